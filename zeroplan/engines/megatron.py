"""The memory and traffic of a Megatron-Core job: what each pipeline rank holds, and at which moments.

With ``bf16-mixed`` a rank holds bf16 weights, fp32 main gradients, an fp32 copy of the weights and Adam's moments. The distributed
optimizer splits the copy and the moments over the data- and context-parallel ranks. Megatron-FSDP also splits gradients, and at
stage 3 weights (``megatron_sharded.py``).

A program per layer (``zeroplan/transformer/families/megatron.py``) gives the activations that the layer keeps, and the peak of its
backward. Megatron's schedules give the micro-batches in flight. zeroplan computes every pipeline rank and reports the one with the
highest peak.

Left out: padding of buckets (each to a multiple of 128 and of the ranks), temporary buffers of collectives, CUDA graphs, FP8's
history of largest values, and the padding of experts' tokens for FP8.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from zeroplan.engines.account import Account, PipelineRank, Symbol
from zeroplan.engines.megatron_chunks import (
    LETTERS,
    Behind,
    Counts,
    Schedule,
    chunks_per_rank,
    counts_of,
    fullest,
    left_behind,
    runs_of,
    stages_of,
)
from zeroplan.engines.megatron_schedule import INPUT, Left, Stage, left_lines, left_of, lines_of, own_state
from zeroplan.engines.megatron_sharded import AT_AHEAD, AT_END, AT_HEAD, AT_LAST, AT_LOSS, AT_STEP, Sharding
from zeroplan.errors import SpecError
from zeroplan.ledger import Among, Collective, Kind, Line, Moment, OffGpu, Phase, Tag, total_bytes
from zeroplan.numeric import Int, ceil_div, maximum, minimum, round_up, where
from zeroplan.spec.batch import Batch
from zeroplan.spec.family import LEARNED_POSITIONS, UNROTATED
from zeroplan.spec.megatron import PRECISIONS, chunks_of, cut_flags
from zeroplan.spec.mesh import Mesh
from zeroplan.spec.model import ModelSpec
from zeroplan.spec.pipeline import Stage as Chunk
from zeroplan.spec.recipe import Precision, RecipeSpec
from zeroplan.transformer.families.megatron import CROSS, ENCODED, PREDICTED
from zeroplan.transformer.megatron import (
    ROUTED,
    UNGATED,
    Cost,
    Layers,
    bytes_in_fp8,
    drops_hidden,
    element_of,
    encoder_length,
    is_gated,
    keeps_placeholders,
    layers_of,
    masks_in_place,
    own_part,
    own_part_formula,
)
from zeroplan.transformer.parameters import Parameter
from zeroplan.transformer.params import layout
from zeroplan.transformer.published import KORTHIKANTI

STATES = "Megatron-LM 2026-08, docs/user-guide/features/dist_optimizer.md, table of bytes per parameter"
OPTIMIZER = "Megatron-LM 2026-08, megatron/core/optimizer/distrib_optimizer.py, DistributedOptimizer"
COPIES = "Megatron-LM 2026-08, megatron/core/optimizer/optimizer.py, _copy_model_grads_to_main_grads"
MUON = "Megatron-LM 2026-08, megatron/core/optimizer/__init__.py, _get_megatron_emerging_optimizer"
ITERATES = "Emerging-Optimizers 2026-08, orthogonalized_optimizers/muon_utils.py, newton_schulz_tp"
UNSCALED = "Transformer Engine 2026-08, pytorch/optimizers/fused_adam.py, FusedAdam.get_unscaled_state"
CACHED = "Transformer Engine 2026-08, pytorch/module/base.py, quantize_weight (read, not run)"
CROSS_ENTROPY = "Megatron-LM 2026-08, megatron/core/tensor_parallel/cross_entropy.py, VocabParallelCrossEntropy"
TARGETS = (
    "Megatron-LM 2026-08, megatron/core/tensor_parallel/cross_entropy.py, VocabParallelCrossEntropy.calculate_predicted_logits"
)
NANOTRON = "nanotron 2411b022, optim/gradient_accumulator.py, FP32GradientAccumulator.backward, and trainer.py, _init_model"
FUSED = "Megatron-LM 2026-08, megatron/core/fusions/fused_cross_entropy.py, calculate_predicted_logits"
FUSED_BY_TRITON = "Transformer Engine 2026-08, pytorch/triton/cross_entropy.py, cross_entropy_forward"
VERLS_HEAD = "verl b178a3cd, utils/kernel/linear_cross_entropy.py, LinearCrossEntropy, and models/mcore/model_forward_fused.py"
IN_PLACE = "Transformer Engine 2.17, pytorch/triton/cross_entropy.py, cross_entropy_forward"
RERUN = "Megatron-LM 2026-08, megatron/core/transformer/transformer_block.py, TransformerBlock._checkpointed_forward"
OVERLAPPED = (
    "Megatron-LM 2026-08, megatron/core/models/common/model_chunk_schedule_plan.py, TransformerModelChunkSchedulePlan.run"
)
EMBEDDED = "Megatron-LM 2026-08, megatron/core/tensor_parallel/layers.py, VocabParallelEmbedding.forward"
ANGLES = "Megatron-LM 2026-08, megatron/core/models/common/embeddings/rotary_pos_embedding.py, RotaryEmbedding.forward"
BUFFER = "Megatron-LM 2026-08, megatron/core/utils.py, GlobalMemoryBuffer.get_tensor (name mpu)"
STAND_INS = "Transformer Engine 2026-08, pytorch/module/base.py, get_dummy_wgrad"
DEFERRED = "Megatron-LM 2026-08, megatron/core/pipeline_parallel/schedules.py, finish_embedding_wgrad_compute"
HEAD = "Megatron-LM 2026-08, megatron/core/tensor_parallel/layers.py, LinearWithGradAccumulationAndAsyncCommunication.backward"
MASK = "Megatron-LM 2026-08, megatron/core/utils.py, get_batch_on_this_tp_rank"
MASK_SAVED = "Megatron-LM 2026-08, megatron/core/tensor_parallel/random.py, CheckpointFunction.forward"
BERT = "Megatron-LM 2026-08, megatron/core/models/bert/bert_model.py, BertModel.forward"
T5 = "Megatron-LM 2026-08, megatron/core/models/T5/t5_model.py, T5Model.forward"
REPORT = "Megatron-LM 2026-08, megatron/training/theoretical_memory_usage.py, compute_activation_memory"
DISPATCHER = "Megatron-LM 2026-08, megatron/core/transformer/moe/token_dispatcher.py, dispatch_preprocess"
_GRAPHS = "inputs of layers with experts and their gradients, until these run again"
SCHEDULE = "Megatron-LM 2026-08, megatron/core/pipeline_parallel/schedules.py, get_pp_rank_microbatches"
VOLUME = f"{KORTHIKANTI}, section 4.2; Narayanan et al. 2021, arXiv:2104.04473, section 3"
NOTE = (
    "layers follow the code of Megatron-Core and Transformer Engine, compared with 230 runs of Megatron-LM's own tests "
    "(0.5 % off in the median, mostly too low); the range of reserved memory is that of replayed runs of its local layers"
)
_EXPERTS_NOTE = (
    "zeroplan assumes even routing; a rank that gets more tokens needs more memory. For 48 runs with experts of Megatron-LM's "
    "tests the estimate was from 10 % too low to 2 % too high; the verdict leaves that room"
)
_UNEVEN_NOTE = (
    "this rank's experts get more tokens than an even share in every layer; their memory is read from Megatron-Core's "
    "dispatcher, not run, and step times assume even routing"
)
EMBEDDING_NORM = "BigScience's Megatron-DeepSpeed 2022, megatron/mpu/layers.py, VocabParallelEmbedding.forward"
_ALIBI = (
    "Megatron-LM has no arguments for BLOOM's positions (ALiBi) and the norm of its embedding, which BigScience's "
    "Megatron-DeepSpeed has; all other parts are counted as Megatron-LM's"
)
_BERT_NOTE = (
    "for 15 runs of BERT in Megatron-LM's tests the estimate was from 1 % to 25 % too low, most in those of half a GiB; the step "
    "time is not modelled"
)
_T5_NOTE = (
    "layers and sequence length are those of T5's decoder, and the encoder is added; for 19 runs in Megatron-LM's tests the "
    "estimate was from 1 % to 8 % too low; the step time is not modelled"
)
_HYBRID_NOTE = (
    "layers follow the hybrid pattern: the model's own number of parameters, of whole layers, is not theirs; the step time is not "
    "modelled"
)
_SHARDED_NOTE = (
    "Megatron-FSDP follows its code in Megatron-Core 0.16.1, run on fake tensors; newer code keeps main gradients in bf16 unless "
    "--megatron-fsdp-main-grads-dtype says fp32 (grad_reduce_in_bf16); the step time is not modelled"
)
_FP8_NOTE = "FP8 is read from Transformer Engine's code, not run; the step time is not modelled with it"
_ROWS_NOTE = "a head of few outputs is whole on every tensor-parallel rank, read from verl's and ms-swift's code, not run"
_VERLS_NOTE = "verl's fused head and loss are read from its code, not run"
_BESIDE_NOTE = "nanotron's gradients in 16 bits are read from its code, not run"
_PREDICTING_NOTE = "multi-token prediction is on the last pipeline rank; the step time is not modelled with it"
ATTENTION_MASK = "attention mask of the data loader (--no-create-attention-mask-in-dataloader goes without)"


#: Megatron-FSDP's stages: ``optim_grads`` and ``optim_grads_params``.
GRADIENTS_TOO, WEIGHTS_TOO = 2, 3
#: Elements of a bucket: the larger of the first, and of the second times the data- and context-parallel ranks.
#: Source: training/training.py, resolve_ddp_bucket_size.
_BUCKET, _BUCKET_OF_A_RANK = 40_000_000, 1_000_000
_KEPT = Tag(off_gpu=OffGpu.KEPT)


class Bytes(NamedTuple):
    """Bytes per parameter."""

    weight: int
    gradient: int
    """In the buffer that accumulates the gradients of all micro-batches."""
    master: int
    """The optimizer's copy of the weights in fp32."""
    at_step: int
    """Temporary fp32 copies: of fp16 gradients, or of the precision-aware optimizer's narrow states."""
    name: str


_NARROW = Bytes(2, 2, 4, 4, "bf16")
"""bf16 with ``--grad-reduce-in-bf16``."""
_BYTES: dict[Precision, Bytes] = {
    "bf16-mixed": Bytes(2, 4, 4, 0, "bf16"),
    "fp16-mixed": Bytes(2, 2, 4, 4, "fp16"),
    "fp32": Bytes(4, 4, 0, 0, "fp32"),
}
_WIDTHS = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8": 1}


def _bytes_of(recipe: RecipeSpec) -> Bytes:
    """Return the bytes per parameter. Raises SpecError for a precision that is not modelled.

    A search calls this before it builds jobs; the check of a job refuses the same precisions.
    """
    options = recipe.megatron
    if recipe.precision not in _BYTES:
        said = ", ".join(PRECISIONS)
        raise SpecError(f"engine 'megatron' with precision {recipe.precision!r} is not modelled; use one of {said}")
    if options.use_precision_aware_optimizer:
        return _aware(recipe)
    found = _NARROW if recipe.precision == "bf16-mixed" and options.grad_reduce_in_bf16 else _BYTES[recipe.precision]
    return found._replace(master=4) if recipe.zero_stage >= GRADIENTS_TOO else found  # Megatron-FSDP also copies fp32 weights


def _aware(recipe: RecipeSpec) -> Bytes:
    """Return the bytes per parameter with the precision-aware optimizer.

    During the step it casts moments and main weights that are not fp32 to fp32. Two bf16 moments stay as they are.
    """
    options, plain = recipe.megatron, _BYTES[recipe.precision]
    narrow = recipe.precision == "fp16-mixed" or options.grad_reduce_in_bf16 or options.main_grads_dtype == "bf16"
    halved = recipe.precision == "bf16-mixed" or options.main_params_dtype == "fp16"
    moments = (options.exp_avg_dtype, options.exp_avg_sq_dtype)
    widened = 0 if moments == ("bf16", "bf16") else sum(dtype != "fp32" for dtype in moments)
    widened += options.main_params_dtype != "fp32"
    return plain._replace(gradient=2 if narrow else 4, master=2 if halved else 4, at_step=4 * widened)


class Rank(NamedTuple):
    """A pipeline rank: its parameters, its layers, and the micro-batches in flight on it."""

    at: int
    elements: Int
    """Parameters outside experts."""
    experts: Int
    matrices: Int
    """Parameters outside experts in matrices that Muon updates."""
    in_fp8: Int
    """Parameters, with experts, in matrices that multiply in FP8."""
    chunks: Int
    """The most chunk forwards that wait for their backward at a time."""
    embeds: Int
    """Micro-batches whose embedding keeps tensors at a time; 0 if another rank has the embedding."""
    has_head: bool
    stages: tuple[Chunk, ...]
    """The chunks of layers on this rank."""
    each: tuple[Counts, ...]
    """Number of layers of each kind, chunk by chunk."""
    schedule: Schedule

    @property
    def counts(self) -> Counts:
        """Number of layers of each kind in all chunks."""
        return tuple(map(sum, zip(*self.each, strict=True)))

    @property
    def layers(self) -> int:
        """Number of layers in all chunks."""
        return sum(self.counts)


class Flying(NamedTuple):
    """The layers of a rank that wait for their backward."""

    counts: tuple[Int, ...]
    """Number of layers of each kind. A checkpoint of several layers counts as one."""
    formulas: tuple[str, ...]
    words: tuple[str, ...]
    each: tuple[Counts, ...]
    """Number of layers of each kind in every chunk, counted in the same way."""
    letters: tuple[str, ...] = ()
    """With a hybrid pattern: the letters of each chunk."""
    kinds: str = ""
    """With a hybrid pattern: the letter of each kind."""

    def over(self, kind: int, other: int) -> int:
        """Layers of kind ``other`` that no longer wait when a chunk's backward runs its last layer of ``kind``.

        The running layer counts as one of them. Chunks may differ; the smallest number is returned.
        """
        if self.letters:
            mine, others = self.kinds[kind], self.kinds[other]
            return min(chunk[chunk.rindex(mine) :].count(others) for chunk in self.letters if mine in chunk)
        if other <= kind:
            return int(other == kind)
        return min(counts[other] for counts in self.each if counts[kind])


def account(model: ModelSpec, recipe: RecipeSpec, mesh: Mesh, batch: Batch) -> Account:
    """Return the memory of the fullest pipeline rank, and its traffic per step. [bytes]

    With several pipeline ranks, all sizes must be ints. Source: the files and papers named in each line.
    """
    every = accounts(model, recipe, mesh, batch)
    if len(every) == 1:
        return every[0]._replace(pipeline=())
    worst = max(every, key=lambda one: int(one.pipeline[0].peak_bytes))
    others = tuple(one.pipeline[0] for one in every if one is not worst)
    note = f"figures are of pipeline rank {worst.pipeline[0].rank}, whose peak is the highest of {len(every)}"
    return worst._replace(pipeline=(*worst.pipeline, *others), notes=(*worst.notes, note))


def accounts(model: ModelSpec, recipe: RecipeSpec, mesh: Mesh, batch: Batch) -> tuple[Account, ...]:
    """Return the memory and traffic of every pipeline rank, first to last. [bytes]"""
    last = int(mesh.pp) - 1
    before = _layers(model, recipe, mesh, batch, received=True) if last else None
    layers = _layers(model, recipe, mesh, batch, received=chunks_per_rank(recipe, mesh) > 1)
    ranks = (rank_of(at, model, recipe, mesh, batch) for at in range(last + 1))
    return tuple(
        _of_rank(rank, layers if before is None or rank.has_head else before, model, recipe, mesh, batch) for rank in ranks
    )


def account_of_rank(at: int, model: ModelSpec, recipe: RecipeSpec, mesh: Mesh, batch: Batch) -> Account:
    """Return the memory and traffic of one pipeline rank. [bytes]

    Of the ranks between the first and the last with the same layers, the first of them needs most.
    """
    layers = _layers(model, recipe, mesh, batch, received=at < int(mesh.pp) - 1 or chunks_per_rank(recipe, mesh) > 1)
    return _of_rank(rank_of(at, model, recipe, mesh, batch), layers, model, recipe, mesh, batch)


def _layers(model: ModelSpec, recipe: RecipeSpec, mesh: Mesh, batch: Batch, *, received: bool) -> Layers:
    """Return the memory of a rank's layers. ``received``: another chunk sends the gradient of their output."""
    return layers_of(model, tuple(run.kind for run in runs_of(model, recipe)), recipe, mesh, batch, received=received)


def _of_rank(rank: Rank, layers: Layers, model: ModelSpec, recipe: RecipeSpec, mesh: Mesh, batch: Batch) -> Account:
    states = tuple(states_of(rank, recipe, mesh))
    moments = tuple(_moments(rank, layers, model, recipe, mesh, batch, states))
    return Account(
        states,
        moments,
        tuple(collectives_of(rank, model, recipe, mesh, batch)),
        symbols=tuple(_symbols(rank, layers, model, recipe, mesh, batch)) if isinstance(batch.micro_batch_size, int) else (),
        notes=(
            NOTE,
            *((_EXPERTS_NOTE if recipe.imbalance == 1 else _UNEVEN_NOTE,) if model.moe is not None else ()),
            *((_ALIBI,) if model.family == "bloom" else ()),
            *((_HYBRID_NOTE,) if recipe.megatron.hybrid_layer_pattern is not None else ()),
            *((_SHARDED_NOTE,) if recipe.zero_stage >= GRADIENTS_TOO else ()),
            *((_FP8_NOTE,) if recipe.megatron.fp8_format is not None else ()),
            *((_ROWS_NOTE,) if model.head_rows is not None else ()),
            *((_VERLS_NOTE,) if recipe.megatron.cross_entropy_fusion_impl == "verl" else ()),
            *((_BESIDE_NOTE,) if recipe.megatron.gradients_beside else ()),
            *((_PREDICTING_NOTE,) if recipe.megatron.mtp_num_layers else ()),
            *_notes_of_cut(model, recipe, mesh),
            *{"gpt": (), "bert": (_BERT_NOTE,), "t5": (_T5_NOTE,)}[recipe.megatron.pretrains],
        ),
        kept=tuple((kind, one.kept) for kind, one in layers.kinds.items()),
        pipeline=(_shown(rank, moments),),
    )


def _symbols(rank: Rank, layers: Layers, model: ModelSpec, recipe: RecipeSpec, mesh: Mesh, batch: Batch) -> Iterator[Symbol]:
    """Yield the symbols in the formulas of one job."""
    yield Symbol("D_rank", rank.elements, "parameters of this pipeline rank beside experts")
    yield Symbol("X_rank", rank.experts, "parameters of this pipeline rank in experts")
    yield from _symbols_of_muon(rank, model, recipe, mesh)
    yield from _symbols_in_fp8(rank, recipe, mesh)
    yield from _symbols_of_shards(rank, model, recipe, mesh)
    for at, elements in _made(rank, model, recipe, mesh).items():
        yield Symbol(f"A_{at}", elements, f"gradients that a backward has made, at the moment: {at}")
    yield Symbol("N_opt", _sharers(recipe, mesh), "ranks that share the optimizer's states")
    yield Symbol("N_exp", _expert_sharers(recipe, mesh), "ranks that share those of experts")
    yield Symbol("K", rank.chunks, "chunks of layers in flight")
    yield from _symbols_of_flying(rank, layers, model, recipe, batch)
    yield Symbol("H", rank.embeds, "micro-batches whose embedding is kept")
    yield from _symbols_of_left(_left(rank, recipe, mesh, batch)._asdict(), "L", "left from before")
    yield from _symbols_of_left(_behind(rank, model, recipe, batch)._asdict(), "J", "that dispatchers' graphs refer to")
    yield Symbol("M", _of_each_shape(rank, model, recipe, mesh), "elements of one matrix of each shape")
    yield Symbol("B", batch.grad_accum_steps, "micro-batches of a step")
    yield Symbol("C", mesh.cp, "context-parallel ranks")
    yield Symbol("p", mesh.tp, "tensor-parallel ranks")
    yield Symbol("V_p", padded_vocabulary(model, recipe, mesh), "vocabulary, padded")
    yield from (Symbol(*one) for one in layers.symbols)
    yield from _sums(layers)


def _symbols_of_muon(rank: Rank, model: ModelSpec, recipe: RecipeSpec, mesh: Mesh) -> Iterator[Symbol]:
    if recipe.optimizer == "muon":
        yield Symbol("Y_rank", rank.matrices, "those of them in matrices that Muon steps")
        yield Symbol("Y_step", _muon_s_step(model, recipe, mesh).n_bytes, "bytes of the Newton-Schulz iterates")


def _symbols_of_shards(rank: Rank, model: ModelSpec, recipe: RecipeSpec, mesh: Mesh) -> tuple[Symbol, ...]:
    sharding = _sharding(rank, model, recipe, mesh)
    return () if sharding is None else tuple(sharding.symbols(sharding.backwards(_lasts(rank, model, recipe))))


def _symbols_of_left(counts: dict[str, Int], letter: str, what: str) -> Iterator[Symbol]:
    """Yield the symbols for leftover hidden states, one per moment."""
    for when, count in counts.items():
        yield Symbol(f"{letter}_{when[0]}", count, f"hidden states {what}: {when}")


def _symbols_of_flying(rank: Rank, layers: Layers, model: ModelSpec, recipe: RecipeSpec, batch: Batch) -> Iterator[Symbol]:
    """Yield the symbols for layers in flight if the rank's chunks differ in their layers."""
    for loss, when in ((False, ""), (True, " when the loss is computed")) if len(set(rank.each)) > 1 else ():
        flying = _flying(rank, layers, model, recipe, batch, loss=loss)
        for name, run, count in zip(flying.formulas, runs_of(model, recipe), flying.counts, strict=True):
            yield Symbol(name, count, f"{run.kind} layers in flight{when}")


def _sums(layers: Layers) -> Iterator[Symbol]:
    """Yield the symbols for the bytes that a layer of each kind keeps."""
    for kind, one in layers.kinds.items():
        yield Symbol(f"S_{kind}", total_bytes(one.kept), f"bytes one {kind} layer keeps")
        whole = total_bytes((*one.cost.kept, *one.cost.statistics))
        yield Symbol(f"W_{kind}", whole, f"bytes one {kind} layer keeps that is not recomputed whole")
        yield Symbol(f"Z_{kind}", total_bytes(one.statistics), f"bytes of one {kind} layer's statistics")


def _shown(rank: Rank, moments: tuple[Moment, ...]) -> PipelineRank:
    """Return the rank's row in the answer's table of pipeline ranks."""
    totals = [moment.total_bytes for moment in moments]
    blocks = "; ".join(f"blocks {one.start + 1} to {one.stop}" for one in rank.stages if one.layers)
    named = (*(["embedding"] if rank.at == 0 else []), blocks, *(["norm and head"] if rank.has_head else []))
    words = ", ".join(name for name in named if name)
    if not all(isinstance(total, int) for total in totals):
        return PipelineRank(rank.at, words, 0, maximum(0, *totals), "")
    highest = moments[totals.index(max(totals))]
    return PipelineRank(rank.at, words, int(rank.elements + rank.experts), highest.total_bytes, highest.name)


def _notes_of_cut(model: ModelSpec, recipe: RecipeSpec, mesh: Mesh) -> tuple[str, ...]:
    """Return a note on how an uneven pipeline is cut, unless the user sets the cut."""
    flags = cut_flags(chunks_of(model.num_hidden_layers, int(mesh.pp) * chunks_per_rank(recipe, mesh)))
    if recipe.pipeline_layers is not None or not flags:
        return ()
    return (f"embedding and loss count as a layer each ({' '.join(flags)}), since the layers alone do not divide",)


# --- which ranks there are, and what they hold -------------------------------------------------------------------------------


def rank_of(at: int, model: ModelSpec, recipe: RecipeSpec, mesh: Mesh, batch: Batch) -> Rank:
    """Return the parameters, chunks and schedule of one pipeline rank."""
    pp, chunks = int(mesh.pp), chunks_per_rank(recipe, mesh)
    first, last = at == 0, at == pp - 1
    stages = stages_of(at, model, recipe, mesh)
    each = tuple(counts_of(stage, model, recipe) for stage in stages)
    inside, experts, matrices = _elements(model, recipe, mesh, tuple(map(sum, zip(*each, strict=True))))
    embedding, end = _ends(model, recipe, mesh)
    ends = (embedding if first else 0) + (end if last else 0)
    if last and not first and (model.tie_word_embeddings or recipe.megatron.mtp_num_layers):
        ends = ends + _table(model, recipe, mesh)  # a copy of the table, without positions: tied, or for next tokens
    group = recipe.megatron.microbatch_group_size_per_virtual_pipeline_stage or pp
    schedule = Schedule(pp - at - 1 if chunks == 1 else 2 * (pp - at - 1) + (chunks - 1) * group, chunks, group)
    flying = minimum(schedule.warm + 1, batch.grad_accum_steps * chunks)
    matrices = matrices + (model.positions * model.hidden_size if first else 0)
    return Rank(
        at,
        inside + ends,
        experts,
        matrices,
        _in_fp8(model, recipe, mesh, tuple(map(sum, zip(*each, strict=True)))),
        flying,
        _embedded_at_once(schedule, batch) if first else 0,
        last,
        stages,
        each,
        schedule,
    )


def _embedded_at_once(schedule: Schedule, batch: Batch) -> Int:
    """Return the most micro-batches whose first chunk waits for its backward at a time."""
    if schedule.chunks == 1:
        return minimum(schedule.warm + 1, batch.grad_accum_steps)
    embedding = ((1,), *[(0,)] * (schedule.chunks - 1))
    return fullest(schedule, embedding, batch.grad_accum_steps, (1,), loss=False)[0]


def _elements(model: ModelSpec, recipe: RecipeSpec, mesh: Mesh, counts: tuple[int, ...]) -> tuple[Int, Int, Int]:
    """Return a rank's parameters in its layers: outside experts, in experts, and outside experts in matrices."""
    beside: Int = 0
    experts: Int = 0
    matrices: Int = 0
    for run, layers in zip(runs_of(model, recipe), counts, strict=True):
        for parameter in run.parameters:
            mine = layers * _of_one_rank(parameter, model, recipe, mesh)
            beside, experts = (beside, experts + mine) if is_expert(parameter) else (beside + mine, experts)
            matrices = matrices + mine * (len(parameter.shape) > 1 and not is_expert(parameter))
        shared = layers * _of_shared_expert(run.kind, model, recipe, mesh)
        beside, matrices = beside + shared, matrices + shared
    return beside, experts, matrices


def _in_fp8(model: ModelSpec, recipe: RecipeSpec, mesh: Mesh, counts: tuple[int, ...]) -> Int:
    """Return the parameters in matrices that multiply in FP8: all of the layers' but the routers'. 0 without FP8."""
    found: Int = 0
    for run, layers in zip(runs_of(model, recipe), counts if recipe.megatron.fp8_format is not None else (), strict=False):
        for parameter in run.parameters:
            if len(parameter.shape) > 1 and ".gate." not in f".{parameter.name}":
                found = found + layers * _of_one_rank(parameter, model, recipe, mesh)
        found = found + layers * _of_shared_expert(run.kind, model, recipe, mesh)
    return found


def _of_shared_expert(kind: str, model: ModelSpec, recipe: RecipeSpec, mesh: Mesh) -> Int:
    """Return a rank's parameters in the shared expert, which every token visits."""
    width = recipe.megatron.moe_shared_expert_intermediate_size if kind in ROUTED else None
    matrices = 3 if is_gated(model, recipe) else 2
    return 0 if width is None else ceil_div(matrices * width * model.hidden_size, mesh.tp)


def _of_one_rank(parameter: Parameter, model: ModelSpec, recipe: RecipeSpec, mesh: Mesh) -> Int:
    """Return the elements of a parameter on one rank.

    Expert-parallel ranks split the experts, and tensor-parallel ranks the matrices. Each rank has whole norms and routers.
    """
    elements = _as_said(parameter, model, recipe)
    if is_expert(parameter):
        return ceil_div(elements, mesh.ep * recipe.megatron.expert_ways(int(mesh.tp)))
    return ceil_div(elements, mesh.tp) if is_split(parameter.name) else elements


def _as_said(parameter: Parameter, model: ModelSpec, recipe: RecipeSpec) -> int:
    """Return the elements of a parameter. Without ``--swiglu`` a gated family's MLPs have no gate."""
    if model.family in UNGATED or is_gated(model, recipe):
        return parameter.numel
    if parameter.name.endswith("gate_up_proj"):
        return parameter.numel // 2
    return 0 if "gate_proj" in parameter.name else parameter.numel


#: Row-parallel matrices, whose outputs the tensor-parallel ranks sum.
BY_ROWS = ("o_proj", "down_proj", "c_proj", "dense", "dense_4h_to_h")


def is_expert(parameter: Parameter) -> bool:
    """Whether the parameter belongs to a routed expert, which only some tokens visit."""
    return parameter.active_share != (1, 1)


@lru_cache(maxsize=1024)
def is_split(name: str) -> bool:
    """Whether tensor-parallel ranks split the parameter of this name."""
    module = name.rpartition(".")[0].rpartition(".")[2]
    if "norm" in module or module.startswith("ln_") or module in ("gate", "q_a_proj", "kv_a_proj_with_mqa"):
        return False
    return not (name.endswith(".bias") and module in BY_ROWS)  # a row-parallel matrix adds its bias after the ranks' sum


def _ends(model: ModelSpec, recipe: RecipeSpec, mesh: Mesh) -> tuple[Int, Int]:
    """Return a rank's parameters before and after the layers: the embedding; the final norm and an untied head."""
    tree, table = layout(model), _table(model, recipe, mesh)
    positions = sum(parameter.numel for parameter in tree.embeddings[1:])
    if model.family not in LEARNED_POSITIONS:  # Megatron-LM adds them to any model
        positions += model.positions * model.hidden_size
    norm = sum(parameter.numel for parameter in tree.tail if "norm" in parameter.name or "ln_" in parameter.name)
    types, more = _of_script(model, recipe, mesh)
    return table + positions + types, norm + more + (0 if model.tie_word_embeddings else _head(model, recipe, mesh)[0])


def _of_script(model: ModelSpec, recipe: RecipeSpec, mesh: Mesh) -> tuple[Int, Int]:
    """Return the further parameters of BERT and T5 before and after the layers.

    Before: the embedding of BERT's two token types. After: BERT's heads, or the final norm of T5's encoder, and the logits' bias.
    """
    script, hidden = recipe.megatron.pretrains, model.hidden_size
    bias = ceil_div(padded_vocabulary(model, recipe, mesh), mesh.tp)
    if script == "gpt":
        return 0, 0
    if script == "t5":
        return 0, 2 * hidden + (bias if model.tie_word_embeddings else 0)
    dense = hidden * hidden + hidden
    binary = recipe.megatron.bert_binary_head
    return 2 * hidden if binary else 0, dense + 2 * hidden + bias + (dense + 2 * hidden + 2 if binary else 0)


def _table(model: ModelSpec, recipe: RecipeSpec, mesh: Mesh) -> Int:
    return ceil_div(padded_vocabulary(model, recipe, mesh) * model.hidden_size, mesh.tp)


def _head(model: ModelSpec, recipe: RecipeSpec, mesh: Mesh) -> tuple[Int, str]:
    """Return the elements of the head's weight on a rank, and the formula. Every rank has a head of few outputs whole.

    Source: verl b178a3cd, models/mcore/model_initializer.py, LinearForLastLayer; mcore-bridge 1.6.5, model/gpt_model.py,
    OutputLayerLinear.
    """
    if model.head_rows is None:
        return _table(model, recipe, mesh), "ceil(V_p·h/p)"
    return model.head_rows * model.hidden_size, f"{model.head_rows}·h"


def padded_vocabulary(model: ModelSpec, recipe: RecipeSpec, mesh: Mesh) -> Int:
    """Return the padded vocabulary size (``--make-vocab-size-divisible-by``). [tokens]"""
    return round_up(model.vocab_size, recipe.megatron.make_vocab_size_divisible_by * mesh.tp)


# --- states -----------------------------------------------------------------------------------------------------------------


def _sharers(recipe: RecipeSpec, mesh: Mesh) -> Int:
    return maximum(1, mesh.dp_shard * mesh.cp // _instances(recipe)) if recipe.zero_stage else 1


def _expert_sharers(recipe: RecipeSpec, mesh: Mesh) -> Int:
    return maximum(1, same_experts(recipe, mesh) // _instances(recipe)) if recipe.zero_stage else 1


def _instances(recipe: RecipeSpec) -> int:
    return recipe.megatron.num_distributed_optimizer_instances


def same_experts(recipe: RecipeSpec, mesh: Mesh) -> Int:
    """Return the number of ranks in a pipeline stage that have the same part of the same experts."""
    return mesh.dp_shard * mesh.cp * mesh.tp // (mesh.ep * recipe.megatron.expert_ways(int(mesh.tp)))


def states_of(rank: Rank, recipe: RecipeSpec, mesh: Mesh) -> Iterator[Line]:
    """Yield the lines of weights, gradients and optimizer states. [bytes]"""
    width, (share, shared) = _bytes_of(recipe), _shared(rank, recipe, mesh)
    whole = rank.elements + rank.experts, "(D_rank + X_rank)"
    weights, named = (share, shared) if recipe.zero_stage == WEIGHTS_TOO else whole
    if recipe.megatron.fp8_format is not None:
        narrow, line = _weights_in_fp8(rank, recipe, mesh)
        weights, named = (
            weights - narrow,
            f"({named} - {_formula_in_fp8(recipe)})" if recipe.megatron.fp8_param_gather else named,
        )
        yield line
    yield Line(Kind.PARAMETERS, width.weight * weights, f"{width.name} weights", f"{width.weight}·{named}", STATES)
    gradients, named = (share, shared) if recipe.zero_stage >= GRADIENTS_TOO else whole
    reason = "main gradients, which micro-batches add up in"
    yield Line(Kind.GRADIENTS, width.gradient * gradients, reason, f"{width.gradient}·{named}", STATES)
    if (buckets := recipe.megatron.gradients_beside - 1) > 0:
        reason = "buckets of gradients in 16 bits, which stay"
        yield Line(Kind.GRADIENTS, 2 * buckets * whole[0], reason, f"{2 * buckets}·{whole[1]}", NANOTRON)
    if width.master:
        reason = "fp32 copy of the weights" if width.master == 4 else "main weights in 16 bits, or what they have beyond bf16"
        yield Line(Kind.OPTIMIZER_STATE, width.master * share, reason, f"{width.master}·{shared}", OPTIMIZER)
    if recipe.optimizer == "muon":
        yield from _muon_s_states(rank, recipe, mesh)
        return
    both = _WIDTHS[recipe.megatron.exp_avg_dtype] + _WIDTHS[recipe.megatron.exp_avg_sq_dtype]
    yield Line(Kind.OPTIMIZER_STATE, both * share, "momentum and variance", f"{both}·{shared}", OPTIMIZER)


def _weights_in_fp8(rank: Rank, recipe: RecipeSpec, mesh: Mesh) -> tuple[Int, Line]:
    """Return the elements that have FP8 weights alone, and the line of all FP8 weights, in every layout that is kept."""
    own, (_, both) = recipe.megatron, bytes_in_fp8(recipe)
    both = 64 if own.fp8_recipe == "blockwise" else both  # blocks of weights are 128 x 128, so their scales are negligible
    if not own.fp8_param_gather:
        reason = "copies of weights in FP8, for all micro-batches"
        n_bytes = both * ceil_div(rank.in_fp8, 32)
        return 0, Line(Kind.WEIGHT_CASTS, n_bytes, reason, f"{both}·ceil(Q_8/32)", CACHED)
    if recipe.zero_stage == WEIGHTS_TOO:
        share = _share_in_fp8(rank, recipe, mesh)
        return share, Line(Kind.PARAMETERS, share, "weights in FP8", "Q_own", CACHED)
    n_bytes = both * ceil_div(rank.in_fp8, 32)
    return rank.in_fp8, Line(Kind.PARAMETERS, n_bytes, "weights in FP8, in all layouts", f"{both}·ceil(Q_8/32)", CACHED)


def _formula_in_fp8(recipe: RecipeSpec) -> str:
    return "Q_own" if recipe.zero_stage == WEIGHTS_TOO else "Q_8"


def _share_in_fp8(rank: Rank, recipe: RecipeSpec, mesh: Mesh) -> Int:
    """Return this rank's share of the FP8 matrices. Different ranks share the experts and the other matrices."""
    dense = ceil_div(rank.in_fp8 - rank.experts, _sharers(recipe, mesh))
    return dense + ceil_div(rank.experts, _expert_sharers(recipe, mesh))


def _symbols_in_fp8(rank: Rank, recipe: RecipeSpec, mesh: Mesh) -> Iterator[Symbol]:
    if recipe.megatron.fp8_format is not None:
        yield Symbol("Q_8", rank.in_fp8, "parameters of this rank in matrices that multiply in FP8")
        if recipe.zero_stage == WEIGHTS_TOO:
            yield Symbol("Q_own", _share_in_fp8(rank, recipe, mesh), "its part of them")


def _muon_s_states(rank: Rank, recipe: RecipeSpec, mesh: Mesh) -> Iterator[Line]:
    """Yield Muon's momentum of matrices, and Adam's states of all other parameters.

    The layer-wise optimizer gives each rank whole matrices; zeroplan assumes equal shares.
    """
    inside, outside = _sharers(recipe, mesh), _expert_sharers(recipe, mesh)
    matrices = ceil_div(rank.matrices, inside) + ceil_div(rank.experts, outside)
    formula = "(ceil(Y_rank/N_opt) + ceil(X_rank/N_exp))"
    yield Line(Kind.OPTIMIZER_STATE, 4 * matrices, "Muon's momentum of matrices", f"4·{formula}", MUON)
    others = ceil_div(rank.elements - rank.matrices, inside)
    reason = "Adam's momentum and variance of embedding, head and vectors"
    yield Line(Kind.OPTIMIZER_STATE, 8 * others, reason, "8·ceil((D_rank - Y_rank)/N_opt)", MUON)


def _muon_s_step(model: ModelSpec, recipe: RecipeSpec, mesh: Mesh) -> Line:
    """Return the memory of the Newton-Schulz iterations for the largest matrix. Every tensor-parallel rank gathers it.

    A rank holds its update, the gathered parts and the whole matrix in fp32. In addition it holds the iterate in fp32 and bf16, or
    two bf16 iterates and two products, whichever is more.
    """
    most: Int = 0
    for (rows, columns), ranks in _largest_matrices(model, recipe, mesh):
        whole, product = rows * columns, min(rows, columns) ** 2
        again = 4 * ceil_div(whole, ranks) + where(ranks > 1, 8 * whole, 0) + max(6 * whole, 4 * whole + 4 * product)
        most = maximum(most, again)
    return Line(Kind.OPTIMIZER_TEMPORARY, most, "Newton-Schulz iterates of the largest matrix", "Y_step", ITERATES)


def _largest_matrices(model: ModelSpec, recipe: RecipeSpec, mesh: Mesh) -> Iterator[tuple[tuple[int, int], Int]]:
    """Yield the rows and columns of a layer's large matrices, and the number of ranks that split each."""
    gates, hidden, mla = 2 if is_gated(model, recipe) else 1, model.hidden_size, model.mla
    if mla is None:
        yield ((model.num_attention_heads + 2 * model.num_key_value_heads) * model.head_dim, hidden), mesh.tp
    else:
        yield (model.num_attention_heads * mla.v_head_dim, hidden), mesh.tp
    if model.moe is None or model.moe.num_dense_layers:
        yield (gates * model.intermediate_size, hidden), mesh.tp
    if model.moe is not None:
        yield (gates * model.moe.moe_intermediate_size, hidden), recipe.megatron.expert_ways(int(mesh.tp))


def _shared(rank: Rank, recipe: RecipeSpec, mesh: Mesh) -> tuple[Int, str]:
    """Return the number of parameters that this rank's optimizer updates, and its formula."""
    share = ceil_div(rank.elements, _sharers(recipe, mesh)) + ceil_div(rank.experts, _expert_sharers(recipe, mesh))
    return share, "(ceil(D_rank/N_opt) + ceil(X_rank/N_exp))"


def step_lines(rank: Rank, recipe: RecipeSpec, mesh: Mesh) -> tuple[Line, ...]:
    """Return the step's temporary fp32 copies: of fp16 gradients, or of the precision-aware optimizer's states. [bytes]"""
    n_bytes, (share, shared) = _bytes_of(recipe).at_step, _shared(rank, recipe, mesh)
    if not n_bytes:
        return ()
    if recipe.megatron.use_precision_aware_optimizer:
        reason, source = "moments and main weights in fp32, for the step", UNSCALED
    else:
        reason, source = "fp32 copies of the gradients, until they are set to zero", COPIES
    return (Line(Kind.OPTIMIZER_TEMPORARY, n_bytes * share, reason, f"{n_bytes}·{shared}", source),)


# --- moments ----------------------------------------------------------------------------------------------------------------


def _moments(
    rank: Rank, layers: Layers, model: ModelSpec, recipe: RecipeSpec, mesh: Mesh, batch: Batch, states: tuple[Line, ...]
) -> Iterator[Moment]:  # fmt: skip
    held = (*states, *_buffers(rank, layers, model, recipe, mesh), *_rotary_tables(layers, model, recipe, mesh))
    embedded = (*_embedded(rank, model, recipe, mesh, batch), *_deferred(rank, model, recipe, mesh, batch))
    flying = _flying(rank, layers, model, recipe, batch)
    in_layers = tuple(_in_layers(flying, layers, model, recipe))
    masks = tuple(_attention_masks(rank, recipe, mesh, batch))
    saved = masks if _saves_mask(recipe) else ()
    left = left_lines(_left(rank, recipe, mesh, batch), model, recipe, mesh, batch)
    behind = _behind(rank, model, recipe, batch)._asdict()
    graphs = lines_of(behind, "J", _GRAPHS, DISPATCHER, own_state(model, recipe, mesh, batch))
    kinds = [run.kind for run, count in zip(runs_of(model, recipe), rank.counts, strict=True) if count]
    running = layers.kinds[kinds[-1]].cost.forward if kinds else ()
    sharding = _sharding(rank, model, recipe, mesh)
    around = *held, *embedded, *masks, *left["forward"], *graphs["forward"]
    yield Moment("all that is in flight", Phase.FORWARD, (*around, *_whole(sharding, AT_LAST), *in_layers, *running))
    if sharding is not None and sharding.gathers:
        unread = tuple(minimum(sharding.unread(), count) for count in flying.counts[-1:])
        ahead = _in_layers(_without(flying, (*[0] * (len(flying.counts) - 1), *unread)), layers, model, recipe)
        yield Moment("forward, with weights ahead", Phase.FORWARD, (*around, *_whole(sharding, AT_AHEAD), *ahead, *running))
    backward = (*held, *embedded, *saved)
    if rank.has_head:
        head, each = head_lines(model, recipe, mesh, batch), tuple(_of_each_token(rank, model, recipe, mesh, batch))
        at_loss = (
            *_in_layers(_flying(rank, layers, model, recipe, batch, loss=True), layers, model, recipe),
            *_of_other_losses(model, recipe, mesh, batch),
            *graphs["loss"],
        )
        gathered = _whole(sharding, AT_LOSS)
        at_its_loss = (*held, *gathered, *at_loss, *embedded, *masks, *left["loss"], *head, *each)
        yield Moment("loss", Phase.LOSS, at_its_loss, of_forward=True)
        cast = (head[0], *_logits_of_loss(model, recipe, mesh, batch))
        yield Moment("backward of the loss", Phase.BACKWARD, (*backward, *left["head"], *gathered, *at_loss, *cast))
        grown = tuple(_head_backward(model, recipe, mesh, batch))
        written = _whole(sharding, AT_HEAD) if keeps_placeholders(recipe) else gathered
        written = (*written, *_made_lines("head", rank, model, recipe, mesh))
        yield Moment("backward of the head", Phase.BACKWARD, (*backward, *left["head"], *written, *at_loss, head[0], *grown))
        if sharding is not None and not keeps_placeholders(recipe) and not model.tie_word_embeddings:
            copied = (*backward, *left["head"], *_whole(sharding, AT_HEAD), *at_loss, head[0], *grown[1:])
            yield Moment("gradient of the head, copied", Phase.BACKWARD, copied)
    around = (*backward, *left["backward"], *_waiting(rank, model, recipe, mesh))
    in_backward = (*around, *graphs["backward"])
    if sharding is None:
        yield from _backward(rank, layers, model, recipe, mesh, batch, flying, around=in_backward)
    else:
        made = _made_lines("end", rank, model, recipe, mesh)
        yield from _backward_of_shards(sharding, rank, layers, model, recipe, flying, around=(*in_backward, *made))
    if rank.at == 0:
        made = _made_lines("end", rank, model, recipe, mesh)
        at_end = (*around, *graphs["embedding"], *_whole(sharding, AT_END), *made)
        yield _backward_of_embedding(rank, layers, model, recipe, mesh, batch, flying, at_end)
    step = (_muon_s_step(model, recipe, mesh),) if recipe.optimizer == "muon" else step_lines(rank, recipe, mesh)
    yield Moment("optimizer step", Phase.STEP, (*held, *_whole(sharding, AT_STEP), *left["step"], *graphs["step"], *step))


def _whole(sharding: Sharding | None, at: str) -> tuple[Line, ...]:
    """Return the lines of Megatron-FSDP's whole weights and gradients at a point of the step. [bytes]"""
    return () if sharding is None else sharding.lines(at)


def _sharding(rank: Rank, model: ModelSpec, recipe: RecipeSpec, mesh: Mesh) -> Sharding | None:
    """Return how Megatron-FSDP shards a rank's parameters; None below stage 2.

    It cannot shard experts that only one rank has.
    """
    if recipe.zero_stage < GRADIENTS_TOO:
        return None
    units, shares = list[Int](), list[Int]()
    several, of_experts = _sharers(recipe, mesh), _expert_sharers(recipe, mesh)
    for at, layers in enumerate(rank.counts):
        beside, experts, _ = _elements(model, recipe, mesh, tuple(int(other == at) for other in range(len(rank.counts))))
        shares += [maximum(ceil_div(beside, several), ceil_div(experts, of_experts))] * layers
        units += [beside + where(of_experts > 1, experts, 0)] * layers
    bucket = maximum(_BUCKET, _BUCKET_OF_A_RANK * mesh.dp_shard * mesh.cp) if recipe.megatron.overlap_grad_reduce else None
    (embedding, end), width = _ends(model, recipe, mesh), _bytes_of(recipe)
    if recipe.zero_stage < WEIGHTS_TOO:  # shares of small buckets are not counted; a single bucket is reduced at the end
        shares = [_shared(rank, recipe, mesh)[0] if bucket is None else 0, *[0] * (len(units) - 1)]
    weights: Int = width.weight * sum(units)
    if recipe.megatron.fp8_param_gather:
        weights = weights - (width.weight - 1) * rank.in_fp8
    transposes = ceil_div(rank.in_fp8, max(1, len(units))) if recipe.megatron.fp8_transposes else 0
    return Sharding(
        recipe.zero_stage == WEIGHTS_TOO, _table(model, recipe, mesh), embedding + end, tuple(reversed(units)),
        tuple(reversed(shares)), bucket, width.weight, weights, transposes, width.gradient,
    )  # fmt: skip


def _kinds_backward(rank: Rank, model: ModelSpec, recipe: RecipeSpec) -> list[str]:
    """Return the kind of each of a rank's layers, in the order of the backward."""
    counted = zip(runs_of(model, recipe), rank.counts, strict=True)
    return [run.kind for run, count in counted for _ in range(count)][::-1]


def _lasts(rank: Rank, model: ModelSpec, recipe: RecipeSpec) -> set[int]:
    """Return, for each kind, how many layers run backward before its last layer does."""
    order = _kinds_backward(rank, model, recipe)
    return {order.index(kind) for kind in order}


def _backward_of_shards(
    sharding: Sharding, rank: Rank, layers: Layers, model: ModelSpec, recipe: RecipeSpec, flying: Flying, *,
    around: tuple[Line, ...],
) -> Iterator[Moment]:  # fmt: skip
    """Yield the moments of the layers' backward under Megatron-FSDP.

    Layers whose backward has run may still have whole gradients. Layers before them may already have gathered weights.
    """
    order, together = _kinds_backward(rank, model, recipe), layers_of_a_checkpoint(recipe)
    again = "" if recipe.recompute == "none" else ", recomputed"
    for behind in sharding.backwards(_lasts(rank, model, recipe)):
        kind = order[behind]
        over = tuple(ceil_div(order[: behind + 1].count(run.kind), together) for run in runs_of(model, recipe))
        cost = layers.kinds[kind].cost
        others = _in_layers(_without(flying, over), layers, model, recipe)
        below = *around, *sharding.lines(behind), *others
        inside = *_run_again_with_it(cost, kind, min(together, len(order))), *cost.backward
        what = f"a layer behind {behind}" if behind else "a layer"
        yield Moment(f"backward of {what}{again}", Phase.BACKWARD, (*below, *inside))
        yield Moment(f"reduction of {what}", Phase.BACKWARD, (*below, sharding.share(behind)))


def _without(flying: Flying, over: tuple[Int, ...]) -> Flying:
    """Return the layers that wait for their backward, without ``over`` layers of each kind."""
    counts = tuple(maximum(0, count - each) for count, each in zip(flying.counts, over, strict=True))
    formulas = tuple(f"({formula} - {each})" for formula, each in zip(flying.formulas, over, strict=True))
    return flying._replace(counts=counts, formulas=formulas)


def _backward_of_embedding(
    rank: Rank, layers: Layers, model: ModelSpec, recipe: RecipeSpec, mesh: Mesh, batch: Batch, flying: Flying,
    around: tuple[Line, ...],
) -> Moment:  # fmt: skip
    """Return the moment at which the embedding makes the gradient of its whole table.

    By then the micro-batch's backward has run all layers of the first chunk.
    """
    together = layers_of_a_checkpoint(recipe)
    over = tuple(ceil_div(count, together) for count in rank.each[0])
    others = _in_layers(_without(flying, over), layers, model, recipe)
    e, what = element_of(recipe), "gradient of the embedding's output, and what the stage received"
    several = 1 if rank.has_head else 2
    arrived = ceil_div(several * e * batch.micro_batch_size * batch.seq_len * model.hidden_size, mesh.cp)
    table = Line(
        Kind.TEMPORARY, e * _table(model, recipe, mesh), "gradient of the embedding's table", "e·ceil(V_p·h/p)", EMBEDDED
    )
    gradient = Line(Kind.ACTIVATION_GRADIENTS, arrived, what, f"ceil({several}·e·T·h/C)", EMBEDDED)
    return Moment("backward of the embedding", Phase.BACKWARD, (*around, *others, table, gradient))


def _left(rank: Rank, recipe: RecipeSpec, mesh: Mesh, batch: Batch) -> Left:
    """Return how many hidden states the pipeline's schedule keeps longer than it needs them."""
    pp = int(mesh.pp)
    group = recipe.megatron.microbatch_group_size_per_virtual_pipeline_stage or pp
    stage = Stage(rank.at, pp, chunks_per_rank(recipe, mesh), batch.grad_accum_steps, group)
    return left_of(stage, overlapped=recipe.megatron.overlap_p2p_comm)


def _behind(rank: Rank, model: ModelSpec, recipe: RecipeSpec, batch: Batch) -> Behind:
    """Return how many hidden states the token dispatchers' graphs keep after full recomputation."""
    if recipe.recompute != "full" or model.moe is None:
        return Behind()
    kinds, together = [run.kind in ROUTED for run in runs_of(model, recipe)], layers_of_a_checkpoint(recipe)
    layers = tuple(sum(ceil_div(count, together) for count in counts) for counts in rank.each)
    routed = tuple(
        sum(ceil_div(count, together) for count, has in zip(counts, kinds, strict=True) if has) for counts in rank.each
    )
    found = left_behind(rank.schedule, layers, routed, batch.grad_accum_steps, received=not rank.has_head)
    given = [chunk for chunk in range(len(layers)) if rank.at or chunk]  # ``_left`` counts the inputs of these chunks
    return found._replace(step=found.step - sum(routed[chunk] == layers[chunk] > 0 for chunk in given))


def _saves_mask(recipe: RecipeSpec) -> bool:
    """Whether autograd saves the data loader's mask.

    A checkpoint of whole layers or of core attention saves it, and so does torch's softmax in local layers. Checkpoints of other
    modules do not.
    """
    of_attention = recipe.recompute == "selective" and "core_attn" in recipe.megatron.recompute_modules.split(",")
    return recipe.recompute == "full" or of_attention or masks_in_place(recipe)


def _backward(
    rank: Rank, layers: Layers, model: ModelSpec, recipe: RecipeSpec, mesh: Mesh, batch: Batch, flying: Flying, *,
    around: tuple[Line, ...],
) -> Iterator[Moment]:  # fmt: skip
    """Yield the peak of the backward of the last layer of each kind. ``around``: the lines outside layers.

    Full recomputation first runs the whole layer again, selective recomputation only some of its modules.
    """
    again = "" if recipe.recompute == "none" else ", recomputed"
    runs = [run for run, count in zip(runs_of(model, recipe), rank.counts, strict=True) if count]
    together = min(layers_of_a_checkpoint(recipe), max(map(max, rank.each)))
    for run in reversed(runs):
        cost = layers.kinds[run.kind].cost
        below = (
            *_in_layers(flying, layers, model, recipe, last=run.kind),
            *_run_again_with_it(cost, run.kind, together),
            *_beside_it(cost, run.kind, recipe, batch),
        )
        below = (*below, *_made_lines(run.kind, rank, model, recipe, mesh))
        what = "a layer" if run is runs[-1] else f"a {run.kind} layer"
        yield Moment(f"backward of {what}{again}", Phase.BACKWARD, (*around, *below, *cost.backward))
    if runs and (made := _made_lines("end", rank, model, recipe, mesh)):
        over = tuple(ceil_div(count, layers_of_a_checkpoint(recipe)) for count in rank.each[0])
        others = _in_layers(_without(flying, over), layers, model, recipe)
        cost = layers.kinds[runs[0].kind].cost
        inside = (
            *_run_again_with_it(cost, runs[0].kind, together),
            *_beside_it(cost, runs[0].kind, recipe, batch),
            *cost.backward,
        )
        yield Moment(f"backward of the last layer{again}", Phase.BACKWARD, (*around, *made, *others, *inside))


def _made(rank: Rank, model: ModelSpec, recipe: RecipeSpec, mesh: Mesh) -> dict[str, Int]:
    """Return the gradients in 16 bits that a backward has made, by moment: of the head, of each kind's first layer, end. [elements]

    The gradients of a running layer are counted whole. At the end an untied embedding has none yet. With several chunks of layers,
    a hybrid pattern or sharded gradients, all are counted at every moment, which is the most.
    """
    if not recipe.megatron.gradients_beside:
        return {}
    order, (embedding, end) = _kinds_backward(rank, model, recipe), _ends(model, recipe, mesh)
    kinds, tied = dict.fromkeys(order), _table(model, recipe, mesh) if model.tie_word_embeddings else 0
    everything = rank.elements + rank.experts
    if len(rank.each) > 1 or recipe.megatron.hybrid_layer_pattern is not None or recipe.zero_stage >= GRADIENTS_TOO:
        return dict.fromkeys(("head", *kinds, "end"), everything)
    made = {"head": end + tied if rank.has_head else 0}
    for kind in kinds:
        done = order[: order.index(kind) + layers_of_a_checkpoint(recipe)]
        counts = tuple(done.count(run.kind) for run in runs_of(model, recipe))
        beside, experts, _ = _elements(model, recipe, mesh, counts)
        made[kind] = made["head"] + beside + experts
    return {**made, "end": everything - (embedding if rank.at == 0 and not model.tie_word_embeddings else 0)}


def _made_lines(at: str, rank: Rank, model: ModelSpec, recipe: RecipeSpec, mesh: Mesh) -> tuple[Line, ...]:
    """Return the line of nanotron's gradients in 16 bits at a moment of the backward; its end adds them up in fp32. [bytes]"""
    made = _made(rank, model, recipe, mesh)
    reason = "gradients in 16 bits, until the backward of the micro-batch ends"
    return (Line(Kind.UNSHARDED_GRADIENTS, 2 * made[at], reason, f"2·A_{at}", NANOTRON),) if made else ()


def _deferred(rank: Rank, model: ModelSpec, recipe: RecipeSpec, mesh: Mesh, batch: Batch) -> Iterator[Line]:
    """Yield what ``--defer-embedding-wgrad-compute`` keeps of earlier micro-batches.

    The head postpones its weight gradient, which needs its inputs and the gradients of its logits.
    """
    options, before = recipe.megatron, batch.grad_accum_steps - 1
    if not (options.defer_embedding_wgrad_compute and rank.has_head):
        return
    limit, e = options.wgrad_deferral_limit, element_of(recipe)
    count, counted = (minimum(limit, before), f"min({limit}, B-1)") if limit else (before, "(B-1)")
    logits = _logits(e, model, recipe, mesh, batch, "gradients of logits of micro-batches before", DEFERRED)
    yield logits._replace(n_bytes=count * logits.n_bytes, formula=f"{counted}·{logits.formula}")
    each = own_part(e * batch.micro_batch_size * batch.seq_len * model.hidden_size, recipe, mesh)
    formula = own_part_formula("e·T·h", recipe)
    yield Line(Kind.ACTIVATIONS, count * each, "inputs of the head of micro-batches before", f"{counted}·{formula}", DEFERRED)
    earlier = maximum(0, before - 1)  # the schedule counts those of the last micro-batch
    more, counted = (minimum(limit, earlier), f"min({limit}, max(0, B-2))") if limit else (earlier, "max(0, B-2)")
    reason = "inputs of the stage and their gradients of micro-batches before, whose graph the head's inputs hold"
    yield Line(Kind.ACTIVATIONS, 2 * more * each, reason, f"2·{counted}·{formula}", INPUT)


def layers_of_a_checkpoint(recipe: RecipeSpec) -> int:
    """Return how many layers one checkpoint of full recomputation has (``--recompute-method uniform``)."""
    return recipe.megatron.recompute_num_layers if recipe.recompute == "full" else 1


def _run_again_with_it(cost: Cost, kind: str, together: int) -> Iterator[Line]:
    """Yield the activations of a checkpoint's other layers, which it runs again together with this one. [bytes]"""
    if together > 1:
        n_bytes = (together - 1) * total_bytes((*cost.kept, *cost.statistics))
        reason = f"what {together - 1} more layers of the checkpoint keep, run again"
        yield Line(Kind.ACTIVATIONS, n_bytes, reason, f"{together - 1}·W_{kind}", RERUN)


def _beside_it(cost: Cost, kind: str, recipe: RecipeSpec, batch: Batch) -> Iterator[Line]:
    """Yield what a layer of the next micro-batch takes, whose forward overlaps this layer's backward. [bytes]"""
    if recipe.megatron.overlap_moe_expert_parallel_comm:
        others = minimum(1, batch.grad_accum_steps - 1)
        kept = total_bytes((*cost.kept, *cost.statistics))
        reason = "what a layer of the next micro-batch keeps, which goes forward beside"
        yield Line(Kind.ACTIVATIONS, others * kept, reason, f"min(1, B-1)·W_{kind}", OVERLAPPED)
        yield from (line._replace(n_bytes=others * line.n_bytes) for line in cost.forward)


def _waiting(rank: Rank, model: ModelSpec, recipe: RecipeSpec, mesh: Mesh) -> Iterator[Line]:
    """Yield the head's gradient of a tied table, which stays until the embedding's gradient is added. [bytes]"""
    if rank.has_head and rank.at == 0 and model.tie_word_embeddings and not keeps_placeholders(recipe):
        reason = "gradient of the tied table by the head, which waits for the embedding's"
        yield Line(Kind.TEMPORARY, element_of(recipe) * _table(model, recipe, mesh), reason, "e·ceil(V_p·h/p)", HEAD)


def _buffers(rank: Rank, layers: Layers, model: ModelSpec, recipe: RecipeSpec, mesh: Mesh) -> Iterator[Line]:
    """Yield the tensors that Megatron-Core allocates once and keeps. [bytes]

    They are one buffer for attention scores and gathered tokens, and Transformer Engine's placeholders for weight gradients.
    """
    needs = {**_scores(recipe), **_gathered(rank, model, recipe)}
    sizes = tuple(layers.value(name) * (1 if width == "" else model.hidden_size) for name, width in needs.items())
    elements = maximum(*sizes) if len(sizes) > 1 else sum(sizes)
    if needs and not (isinstance(elements, int) and not elements):
        several = ", ".join(f"{width}{name}" for name, width in needs.items())
        formula = f"e·max({several})" if len(needs) > 1 else f"e·{several}"
        reason = "buffer of attention scores, one for all layers" if _scores(recipe) else "buffer of gathered tokens"
        yield Line(Kind.WORKSPACE, element_of(recipe) * elements, reason, formula, BUFFER, _KEPT)
    if keeps_placeholders(recipe):
        yield _stand_ins(rank, model, recipe, mesh)


def _rotary_tables(layers: Layers, model: ModelSpec, recipe: RecipeSpec, mesh: Mesh) -> Iterator[Line]:
    """Yield the rotary angles of all positions in fp32. Every chunk of layers makes them once. [bytes]"""
    if (
        model.positions
        or model.mla is not None
        or model.family in UNROTATED
        or recipe.megatron.hybrid_layer_pattern is not None
    ):
        return
    chunks = chunks_per_rank(recipe, mesh)
    yield Line(Kind.ACTIVATIONS, 4 * chunks * layers.value("R_r"), "angles of rotary positions", f"{4 * chunks}·R_r", ANGLES)


def _scores(recipe: RecipeSpec) -> dict[str, str]:
    """Return the symbols of the attention scores that local layers write into Megatron's buffer."""
    if recipe.megatron.transformer_impl != "local":
        return {}
    return dict.fromkeys(("S_r", "S_e", "S_c") if recipe.megatron.pretrains == "t5" else ("S_r",), "")


def _gathered(rank: Rank, model: ModelSpec, recipe: RecipeSpec) -> dict[str, str]:
    """Return the symbols of the tokens gathered into the buffer, with the width of each.

    Megatron's own matrices gather their input there, and so does the all-gather dispatcher of experts.
    """
    own_matrices = rank.has_head or recipe.megatron.transformer_impl == "local"
    gathers_for_experts = model.moe is not None and recipe.megatron.moe_token_dispatcher_type == "allgather"  # noqa: S105
    return {**({"T_w": "h·"} if own_matrices else {}), **({"T_a": "h·"} if gathers_for_experts else {})}


def _stand_ins(rank: Rank, model: ModelSpec, recipe: RecipeSpec, mesh: Mesh) -> Line:
    """Return the placeholders that Transformer Engine gives to autograd instead of weight gradients. [bytes]

    The real gradients are in the main gradients already. Transformer Engine keeps one placeholder for each shape of a matrix.
    """
    reason = "placeholders for gradients that matrices accumulate themselves, one per shape"
    return Line(Kind.WORKSPACE, element_of(recipe) * _of_each_shape(rank, model, recipe, mesh), reason, "e·M", STAND_INS)


def _of_each_shape(rank: Rank, model: ModelSpec, recipe: RecipeSpec, mesh: Mesh) -> Int:
    """Return the elements of one matrix of each shape: in attention, dense MLP, one expert and the head."""
    found: dict[str, Int] = {}
    for run in (run for run, here in zip(runs_of(model, recipe), rank.counts, strict=True) if here):
        for parameter in run.parameters:
            if is_expert(parameter) and model.moe is not None:
                found[parameter.name] = ceil_div(_of_one_rank(parameter, model, recipe, mesh) * mesh.ep, model.moe.num_experts)
            elif is_split(parameter.name) and not parameter.name.endswith(".bias"):
                found[parameter.name] = _of_one_rank(parameter, model, recipe, mesh)
        found["shared expert"] = maximum(found.get("shared expert", 0), _of_shared_expert(run.kind, model, recipe, mesh))
    of_head = rank.has_head and recipe.megatron.cross_entropy_fusion_impl != "verl"  # whose kernels return the gradient
    elements: Int = _head(model, recipe, mesh)[0] if of_head else 0
    for each in found.values():
        elements = elements + each
    return elements


def _flying(rank: Rank, layers: Layers, model: ModelSpec, recipe: RecipeSpec, batch: Batch, *, loss: bool = False) -> Flying:
    """Return the layers in flight when they need most memory; with ``loss``, when the loss is computed."""
    kinds, together = [run.kind for run in runs_of(model, recipe)], layers_of_a_checkpoint(recipe)
    each = tuple(tuple(ceil_div(count, together) for count in counts) for counts in rank.each)
    letters = _letters_of(rank, recipe, kinds)
    if len(set(each)) == 1:
        counts: tuple[Int, ...] = tuple(rank.chunks * count for count in each[0])
        words = tuple(f"{count} {kind} layers of a chunk" for count, kind in zip(each[0], kinds, strict=True))
        return Flying(counts, tuple(f"K·{count}" for count in each[0]), words, each, *letters)
    weights = tuple(total_bytes((*layers.kinds[kind].kept, *layers.kinds[kind].statistics)) for kind in kinds)
    found = fullest(rank.schedule, each, batch.grad_accum_steps, weights, loss=loss)
    letter = "G" if loss else "F"
    words = tuple(f"{kind} layers" for kind in kinds)
    return Flying(found, tuple(f"{letter}_{kind}" for kind in kinds), words, each, *letters)


def _letters_of(rank: Rank, recipe: RecipeSpec, kinds: list[str]) -> tuple[tuple[str, ...], str]:
    """Return a hybrid pattern's letters for each chunk of a rank, and the letter of each kind; empty without a pattern."""
    pattern = recipe.megatron.hybrid_layer_pattern
    if pattern is None:
        return (), ""
    return tuple(pattern[one.start : one.stop] for one in rank.stages), "".join(LETTERS[kind] for kind in kinds)


def _in_layers(
    flying: Flying, layers: Layers, model: ModelSpec, recipe: RecipeSpec, *, last: str | None = None
) -> Iterator[Line]:
    """Yield the activations that layers in flight keep. [bytes]

    With ``last``, the backward runs a layer of that kind. Neither this layer nor the later ones of its chunk are counted.
    """
    kinds = [run.kind for run in runs_of(model, recipe)]
    at = None if last is None else kinds.index(last)
    for number, kind in enumerate(kinds):
        count, formula = flying.counts[number], flying.formulas[number]
        over = 0 if at is None else flying.over(at, number)
        if isinstance(count, int) and count <= over:
            continue
        if kind == "decoder":
            yield from _encoded(layers, model, recipe)
        several = f"({formula} - {over})" if over else formula
        for letter, lines, what in (
            ("S", layers.kinds[kind].kept, "keep"),
            ("Z", layers.kinds[kind].statistics, "keep of statistics"),
        ):
            if lines:
                reason = f"what {flying.words[number]} {what}, of every chunk in flight"
                n_bytes = maximum(0, count - over) * total_bytes(lines)
                yield Line(Kind.ACTIVATIONS, n_bytes, reason, f"{several}·{letter}_{kind}", SCHEDULE)


def _encoded(layers: Layers, model: ModelSpec, recipe: RecipeSpec) -> Iterator[Line]:
    """Yield the output of T5's encoder, which every decoder layer reads, and what its final norm keeps. [bytes]"""
    tokens, e = layers.value("T_e"), element_of(recipe)
    yield Line(Kind.ACTIVATIONS, e * tokens * model.hidden_size, ENCODED, "e·T_e·h", CROSS)
    norm = (e * model.hidden_size + 8) * tokens
    yield Line(Kind.ACTIVATIONS, norm, "input and statistics of the encoder's final norm", "(e·h + 8)·T_e", T5)


def _embedded(rank: Rank, model: ModelSpec, recipe: RecipeSpec, mesh: Mesh, batch: Batch) -> Iterator[Line]:
    """Yield the token ids, the mask of the embedding's dropout, and what a norm after the embedding keeps. [bytes]"""
    tokens = batch.micro_batch_size * batch.seq_len
    width, what = _of_embedding(model, recipe), "input ids and positions, int64" if model.positions else "input ids, int64"
    ids = ceil_div(width * tokens, mesh.cp)
    yield Line(Kind.ACTIVATIONS, rank.embeds * ids, what, f"H·ceil({width}·T/C)", REPORT)
    if recipe.megatron.pretrains == "t5":
        read = batch.micro_batch_size * encoder_length(recipe, batch)
        yield Line(Kind.ACTIVATIONS, rank.embeds * 16 * read, "the encoder's input ids and mask, int64", "H·16·T_e", T5)
        if drops_hidden(model, recipe):
            n_bytes = rank.embeds * read * model.hidden_size
            yield Line(Kind.ACTIVATIONS, n_bytes, "mask of the dropout before the encoder", "H·T_e·h", T5)
    if drops_hidden(model, recipe):
        masks, formula = (
            rank.embeds * own_part(tokens * model.hidden_size, recipe, mesh),
            f"H·{own_part_formula('T·h', recipe)}",
        )
        yield Line(Kind.ACTIVATIONS, masks, "mask of the embedding's dropout", formula, REPORT)
    if model.family == "bloom":
        inputs = rank.embeds * ceil_div((element_of(recipe) * model.hidden_size + 8) * tokens, mesh.cp)
        reason = "input of the embedding's norm, and its statistics"
        yield Line(Kind.ACTIVATIONS, inputs, reason, "H·ceil((e·h + 8)·T/C)", EMBEDDING_NORM)


def _of_embedding(model: ModelSpec, recipe: RecipeSpec) -> int:
    """Return the size of token ids, with positions where these are learned; of BERT's and T5's whole batch. [bytes per token]"""
    return {"gpt": 16 if model.positions else 8, "bert": 40, "t5": 32}[recipe.megatron.pretrains]


def _attention_masks(rank: Rank, recipe: RecipeSpec, mesh: Mesh, batch: Batch) -> Iterator[Line]:
    """Yield the attention mask of the first and the last rank: one byte per pair of tokens of the current micro-batch. [bytes]

    If autograd saves the mask, the first rank has one for each micro-batch in flight. BERT and T5 have masks of padding instead.
    """
    if recipe.megatron.pretrains != "gpt":
        yield _padding_masks(recipe, batch)
        return
    if not (recipe.megatron.create_attention_mask_in_dataloader and (rank.at == 0 or rank.has_head)):
        return
    each = ceil_div(batch.micro_batch_size * batch.seq_len * batch.seq_len, mesh.cp)
    if not _saves_mask(recipe) or rank.at > 0:
        yield Line(Kind.ACTIVATIONS, each, ATTENTION_MASK, "ceil(T·s/C)", MASK)
    else:
        yield Line(Kind.ACTIVATIONS, rank.embeds * each, ATTENTION_MASK, "H·ceil(T·s/C)", MASK_SAVED)


def _padding_masks(recipe: RecipeSpec, batch: Batch) -> Line:
    """Return the masks of padding, which every rank has. [bytes]

    Transformer Engine's layers get one byte per token, local layers one byte per pair of tokens.
    """
    size, pairs, own = batch.micro_batch_size, recipe.megatron.transformer_impl == "local", batch.seq_len
    other = encoder_length(recipe, batch)
    if recipe.megatron.pretrains == "bert":
        n_bytes, formula = (size * own * own, "T·s") if pairs else (size * own, "T")
    elif pairs:
        n_bytes, formula = size * (other * other + own * own + own * other), "T_e·s_e + T·s + T·s_e"
    else:
        n_bytes, formula = size * (other + own), "T_e + T"
    return Line(Kind.ACTIVATIONS, n_bytes, "masks of padding", formula, BERT if recipe.megatron.pretrains == "bert" else T5)


#: The batch on the GPU: labels, loss mask, token ids and positions. If the first rank is also the last, ``_embedded`` counts the
#: part that the embedding reads. [bytes per token]
_BATCH = 8 + 4 + 8 + 8
#: At the peak of the loss: labels in the logits' order, maxima, mask and local ids of targets, their indices, and the targets'
#: logits twice. [bytes per token]
_TARGETS = 8 + 4 + 1 + 8 + 8 + 2 * 4


def _of_each_token(rank: Rank, model: ModelSpec, recipe: RecipeSpec, mesh: Mesh, batch: Batch) -> Iterator[Line]:
    """Yield the few numbers per token beside the logits: the batch, the loss, and the final norm's statistics. [bytes]"""
    tokens = ceil_div(batch.micro_batch_size * batch.seq_len, mesh.cp)
    whole = _BATCH if recipe.megatron.pretrains == "gpt" else 4 + _of_embedding(model, recipe)
    width = whole if rank.at else whole - _of_embedding(model, recipe)
    yield Line(Kind.ACTIVATIONS, width * tokens, "labels and the rest of the batch", f"{width}·ceil(T/C)", MASK)
    yield Line(Kind.LOGITS, _TARGETS * tokens, "what the loss has per token", f"{_TARGETS}·ceil(T/C)", TARGETS)
    wide, own = 8 if model.family in UNGATED else 4, own_part(batch.micro_batch_size * batch.seq_len, recipe, mesh)
    formula = f"{wide}·{own_part_formula('T', recipe)}"
    yield Line(Kind.ACTIVATIONS, wide * own, "statistics of the final norm", formula, REPORT)


def head_lines(model: ModelSpec, recipe: RecipeSpec, mesh: Mesh, batch: Batch) -> tuple[Line, ...]:
    """Return the inputs of the final norm and of the head, and all logits at the peak of the loss. [bytes]"""
    tokens, hidden, e = batch.micro_batch_size * batch.seq_len, model.hidden_size, element_of(recipe)
    count, what, source = 2, "inputs of the final norm and of the head", REPORT
    if recipe.megatron.pretrains == "bert":  # BERT's head has a matrix, GELU and a norm before the vocabulary's matrix
        count, what, source = 5, "inputs of the final norm and of all parts of the head", BERT
    inputs = own_part(count * e * tokens * hidden, recipe, mesh)
    lines = [Line(Kind.LOGITS, inputs, what, own_part_formula(f"{count}·e·T·h", recipe), source)]
    lines += _logits_of_loss(model, recipe, mesh, batch)
    if recipe.megatron.cross_entropy_fusion_impl == "native":
        lines.append(_logits(4, model, recipe, mesh, batch, "a further copy in fp32, of the fused loss", FUSED))
    return tuple(lines)


def _of_other_losses(model: ModelSpec, recipe: RecipeSpec, mesh: Mesh, batch: Batch) -> Iterator[Line]:
    """Yield what the losses of multi-token prediction keep. They run before the model's own loss, and backward after it. [bytes]"""
    modules, tokens, e = recipe.megatron.mtp_num_layers, batch.micro_batch_size * batch.seq_len, element_of(recipe)
    if not modules:
        return
    inputs = own_part(3 * e * tokens * model.hidden_size, recipe, mesh)
    what = "of multi-token prediction, inputs of final norm and head, and of its hidden states' norm"
    yield Line(Kind.LOGITS, modules * inputs, what, f"{modules}·{own_part_formula('3·e·T·h', recipe)}", PREDICTED)
    in_place = recipe.megatron.cross_entropy_fusion_impl == "te" and recipe.megatron.transformer_engine_release != "2.18"
    kept = _logits(
        e if in_place else 4, model, recipe, mesh, batch, "of multi-token prediction, logits of its loss", CROSS_ENTROPY
    )
    yield kept._replace(n_bytes=modules * kept.n_bytes, formula=f"{modules}·{kept.formula}")


def _logits_of_loss(model: ModelSpec, recipe: RecipeSpec, mesh: Mesh, batch: Batch) -> Iterator[Line]:
    """Yield the logits at the peak of the loss. [bytes]

    Its backward starts with as many: the fp32 tensor holds the gradient, which is cast to 16 bits.
    """
    options, narrow = recipe.megatron, element_of(recipe) < 4
    if options.cross_entropy_fusion_impl == "verl":
        yield from _kept_by_verl(model, recipe, mesh, batch)
        return
    fused = options.cross_entropy_fusion_impl == "te"
    if fused and options.transformer_engine_release != "2.18":
        reason = "logits, which their gradient is written over"
        yield _logits(element_of(recipe), model, recipe, mesh, batch, reason, IN_PLACE)
        return
    source = FUSED_BY_TRITON if fused else CROSS_ENTROPY
    reason = "gradient of the logits in fp32" if fused else "logits in fp32"
    yield _logits(4, model, recipe, mesh, batch, reason, source)
    if narrow:
        yield _logits(2, model, recipe, mesh, batch, "logits in 16 bits, which those are made of", source)


def _head_backward(model: ModelSpec, recipe: RecipeSpec, mesh: Mesh, batch: Batch) -> Iterator[Line]:
    """Yield the gradients in the head's backward: of logits and input, and of the weight unless it is fused. [bytes]"""
    e = element_of(recipe)
    if recipe.megatron.cross_entropy_fusion_impl == "verl":
        yield from _head_of_verl_backward(model, recipe, mesh, batch)
        return
    yield _logits(e, model, recipe, mesh, batch, "gradient of the logits", CROSS_ENTROPY)
    read = ceil_div(e * batch.micro_batch_size * batch.seq_len * model.hidden_size, mesh.cp)
    yield Line(Kind.ACTIVATION_GRADIENTS, read, "gradient of the head's input", "ceil(e·T·h/C)", HEAD)
    if recipe.sequence_parallel and mesh.tp > 1:
        part = own_part(e * batch.micro_batch_size * batch.seq_len * model.hidden_size, recipe, mesh)
        reason = "this rank's part of it, which ranks add up"
        yield Line(Kind.ACTIVATION_GRADIENTS, part, reason, own_part_formula("e·T·h", recipe), HEAD)
    if not keeps_placeholders(recipe):
        weight, formula = _head(model, recipe, mesh)
        yield Line(Kind.TEMPORARY, e * weight, "gradient of the head's weight", f"e·{formula}", HEAD)


#: Columns of the vocabulary that verl's kernels take at a time in the forward and in the backward (utils/kernel/kernels.py).
_COLUMNS, _COLUMNS_BACKWARD = 1024, 9504


def _kept_by_verl(model: ModelSpec, recipe: RecipeSpec, mesh: Mesh, batch: Batch) -> Iterator[Line]:
    """Yield what verl's fused head and loss keep beside the head's input, and the forward's sums. [bytes]

    With sequence parallelism the input is gathered and kept. The sums are three numbers for each piece of 1,024 columns and five
    results, for each token in fp32.
    """
    pieces = ceil_div(ceil_div(padded_vocabulary(model, recipe, mesh), mesh.tp), _COLUMNS)
    tokens = ceil_div(batch.micro_batch_size * batch.seq_len, mesh.cp)
    formula = f"4·(3·ceil(ceil(V_p/p)/{_COLUMNS}) + 5)·ceil(T/C)"
    reason = "sums of the loss for pieces of the vocabulary"
    yield Line(Kind.LOGITS, 4 * (3 * pieces + 5) * tokens, reason, formula, VERLS_HEAD)
    yield from _gathered_for_verl(model, recipe, mesh, batch)


def _gathered_for_verl(model: ModelSpec, recipe: RecipeSpec, mesh: Mesh, batch: Batch) -> Iterator[Line]:
    if recipe.sequence_parallel and mesh.tp > 1:
        tokens, e = ceil_div(batch.micro_batch_size * batch.seq_len, mesh.cp), element_of(recipe)
        n_bytes = e * tokens * model.hidden_size
        yield Line(Kind.LOGITS, n_bytes, "input of the head, gathered and kept", "e·ceil(T/C)·h", VERLS_HEAD)


def _head_of_verl_backward(model: ModelSpec, recipe: RecipeSpec, mesh: Mesh, batch: Batch) -> Iterator[Line]:
    """Yield the backward of verl's fused head: a piece of the logits' gradient, and the gradients of input and weight. [bytes]

    A piece's product with the weight is added to the gradient of the input; the last piece is copied without its padding. Both at
    once are counted, which is at most one of them too much.
    """
    e, tokens = element_of(recipe), ceil_div(batch.micro_batch_size * batch.seq_len, mesh.cp)
    yield from _gathered_for_verl(model, recipe, mesh, batch)
    reason = "two pieces of the gradient of the logits"
    yield Line(Kind.LOGITS, 2 * e * _COLUMNS_BACKWARD * tokens, reason, f"2·e·{_COLUMNS_BACKWARD}·ceil(T/C)", VERLS_HEAD)
    read = 2 * e * tokens * model.hidden_size
    reason = "gradient of the head's input, and a piece's part of it"
    yield Line(Kind.ACTIVATION_GRADIENTS, read, reason, "2·e·ceil(T/C)·h", VERLS_HEAD)
    weight, formula = _head(model, recipe, mesh)
    yield Line(Kind.TEMPORARY, e * weight, "gradient of the head's weight", f"e·{formula}", VERLS_HEAD)


def _logits(width: int, model: ModelSpec, recipe: RecipeSpec, mesh: Mesh, batch: Batch, reason: str, source: str) -> Line:
    tokens = batch.micro_batch_size * batch.seq_len
    if model.head_rows is not None:
        n_bytes = ceil_div(width * tokens * model.head_rows, mesh.cp)
        return Line(Kind.LOGITS, n_bytes, reason, f"ceil({width}·T·{model.head_rows}/C)", source)
    n_bytes = ceil_div(width * tokens * padded_vocabulary(model, recipe, mesh), mesh.cp * mesh.tp)
    return Line(Kind.LOGITS, n_bytes, reason, f"ceil({width}·T·V_p/(C·p))", source)


# --- traffic ----------------------------------------------------------------------------------------------------------------


def collectives_of(rank: Rank, model: ModelSpec, recipe: RecipeSpec, mesh: Mesh, batch: Batch) -> Iterator[Collective]:
    """Yield the collectives of a rank per step. Left out: single numbers, counts of tokens, gradients of norms."""
    width, beside = _bytes_of(recipe), mesh.dp_shard * mesh.cp
    together = model.moe is None or recipe.megatron.overlap_param_gather
    times = 1 if together else where(mesh.ep > 1, 2, 1)  # experts have their own optimizer; each optimizer gathers all weights
    parts = [("parameters", Among.SHARDS, beside, rank.elements)]
    if model.moe is not None:
        parts.append(("experts", Among.SHARDS_OF_EXPERTS, same_experts(recipe, mesh), rank.experts))
    sharding = _sharding(rank, model, recipe, mesh)
    for what, among, ranks, elements in parts:
        if sharding is None:
            yield from _of_gradients(what, among, width, recipe, ranks, elements, times)
        else:
            yield from _of_shards(sharding, what, among, ranks, elements, batch)
    yield from _within_layers(rank, model, recipe, mesh, batch)
    if int(mesh.pp) > 1:
        tokens = own_part(batch.micro_batch_size * batch.seq_len, recipe, mesh)
        for phase, is_end in ((Phase.FORWARD, rank.has_head), (Phase.BACKWARD, rank.at == 0)):
            calls = batch.grad_accum_steps * (len(rank.stages) - is_end)  # the first and the last stage have one neighbour
            if not (isinstance(calls, int) and not calls):
                yield _sent(
                    "hidden states to the next stage",
                    phase,
                    Among.STAGES,
                    2,
                    calls,
                    element_of(recipe) * tokens * model.hidden_size,
                )
        if model.tie_word_embeddings and (rank.at == 0 or rank.has_head):
            gradient = _bytes_of(recipe).gradient * _table(model, recipe, mesh)
            what = "gradient of the tied table, of first and last stage"
            yield _call("all_reduce", what, Phase.BACKWARD, Among.STAGES, 2, 1, gradient, passes=2)


def _of_gradients(
    what: str, among: Among, width: Bytes, recipe: RecipeSpec, ranks: Int, elements: Int, times: Int
) -> Iterator[Collective]:  # fmt: skip
    gradients: Int = width.gradient * elements
    if not recipe.zero_stage:
        yield _call("all_reduce", f"gradients of {what}", Phase.BACKWARD, among, ranks, 1, gradients, passes=2)
        return
    yield _call("reduce_scatter", f"gradients of {what}", Phase.BACKWARD, among, ranks, 1, gradients)
    yield _call("all_gather", what, Phase.STEP, among, ranks, times, width.weight * elements)


def _of_shards(
    sharding: Sharding, what: str, among: Among, ranks: Int, elements: Int, batch: Batch
) -> Iterator[Collective]:  # fmt: skip
    """Yield Megatron-FSDP's collectives. Every micro-batch reduces gradients, and at stage 3 gathers the layers' weights."""
    calls, gradients = batch.grad_accum_steps, sharding.width_of_gradient * elements
    yield _call("reduce_scatter", f"gradients of {what}", Phase.BACKWARD, among, ranks, calls, gradients)
    if not sharding.gathers:
        yield _call("all_gather", what, Phase.STEP, among, ranks, 1, sharding.width * elements)
        return
    ends = 0 if among is Among.SHARDS_OF_EXPERTS else sharding.ends
    if not (isinstance(ends, int) and not ends):
        yield _call("all_gather", f"{what} beside layers", Phase.STEP, among, ranks, 1, sharding.width * ends)
    for phase, gathered in zip(
        (Phase.FORWARD, Phase.BACKWARD), sharding.gathered_per_micro_batch(elements - ends), strict=True
    ):
        if not (isinstance(gathered, int) and not gathered):
            yield _call("all_gather", f"{what} of layers", phase, among, ranks, calls, sharding.width * gathered)


def _within_layers(rank: Rank, model: ModelSpec, recipe: RecipeSpec, mesh: Mesh, batch: Batch) -> Iterator[Collective]:
    """Yield the collectives within layers.

    Tensor parallelism has two all-reduces per layer and pass. Sequence parallelism has as many all-gathers and reduce-scatters
    instead, and its backward gathers the matrices' inputs once more.
    """
    calls = batch.grad_accum_steps * rank.layers
    forwards = 2 if recipe.recompute == "full" else 1
    tokens = ceil_div(batch.micro_batch_size * batch.seq_len, mesh.cp)
    hidden = element_of(recipe) * tokens * model.hidden_size
    pairs = calls * (2 if recipe.megatron.hybrid_layer_pattern is None else 1)  # column-parallel and row-parallel matrix
    for phase, passes in ((Phase.FORWARD, 1), (Phase.BACKWARD, forwards)):
        yield from _between_tensor_ranks(recipe, mesh, phase, passes * pairs, pairs, hidden)
    yield from _at_ends(rank, model, recipe, mesh, batch, hidden)
    if recipe.megatron.pretrains == "t5":
        yield from _within_t5(calls, model, recipe, mesh, batch)
    yield from _around_rings(model, recipe, mesh, calls, forwards, tokens)
    if model.moe is not None:
        yield from _to_experts(rank, model, recipe, mesh, batch)


def _at_ends(
    rank: Rank, model: ModelSpec, recipe: RecipeSpec, mesh: Mesh, batch: Batch, hidden: Int
) -> Iterator[Collective]:  # fmt: skip
    """Yield the collectives of tensor-parallel ranks around embedding and head.

    The ranks sum the embedded tokens, the gradient of the head's input and the numbers of the loss. Sequence parallelism replaces
    the first two sums by reduce-scatters (with learned positions only the second), and gathers what they split.
    """
    calls, split = batch.grad_accum_steps, recipe.sequence_parallel
    embedded, head = ("embedded tokens", Among.TENSOR, mesh.tp, calls), ("the head's input", Among.TENSOR, mesh.tp, calls)

    def send(operation: str, phase: Phase, which: tuple[str, Among, Int, Int], payload: Int) -> Collective:
        what, among, ranks, times = which
        passes = 2 if operation == "all_reduce" else 1
        return _call(operation, what, phase, among, ranks, times, payload, passes=passes, near=True)

    if rank.at == 0:
        yield send("reduce_scatter" if split and not model.positions else "all_reduce", Phase.FORWARD, embedded, hidden)
        if split:
            yield send("all_gather", Phase.BACKWARD, embedded, hidden)
    if rank.has_head:
        if split:
            yield send("all_gather", Phase.FORWARD, head, hidden)
            yield send("all_gather", Phase.BACKWARD, head, hidden)
        yield send("reduce_scatter" if split else "all_reduce", Phase.BACKWARD, head, hidden)
        of_tokens = 4 * ceil_div(batch.micro_batch_size * batch.seq_len, mesh.cp)
        yield send("all_reduce", Phase.FORWARD, ("numbers of the loss", Among.TENSOR, mesh.tp, 3 * calls), of_tokens)


def _within_t5(calls: Int, model: ModelSpec, recipe: RecipeSpec, mesh: Mesh, batch: Batch) -> Iterator[Collective]:
    """Yield T5's sums beyond two per decoder layer: of cross attention, of encoder layers, and of the encoder output's gradient."""
    per_token = element_of(recipe) * batch.micro_batch_size * model.hidden_size
    hidden, encoded = per_token * batch.seq_len, per_token * encoder_length(recipe, batch)
    of_encoder = 2 * batch.grad_accum_steps * runs_of(model, recipe)[0].layers
    for phase, read in ((Phase.FORWARD, 0), (Phase.BACKWARD, calls)):
        yield from _between_tensor_ranks(recipe, mesh, phase, calls, 0, hidden)
        yield from _between_tensor_ranks(recipe, mesh, phase, of_encoder + read, 0, encoded)


def _between_tensor_ranks(
    recipe: RecipeSpec, mesh: Mesh, phase: Phase, sums: Int, pairs: Int, hidden: Int
) -> Iterator[Collective]:  # fmt: skip
    what = "hidden states", phase, Among.TENSOR, mesh.tp
    if not recipe.sequence_parallel:
        yield _call("all_reduce", *what, sums, hidden, passes=2, near=True)
        return
    inputs = pairs if phase is Phase.BACKWARD else 0
    yield _call("all_gather", *what, sums + inputs, hidden, near=True)
    yield _call("reduce_scatter", *what, sums, hidden, near=True)


def _around_rings(
    model: ModelSpec, recipe: RecipeSpec, mesh: Mesh, calls: Int, forwards: int, tokens: Int
) -> Iterator[Collective]:
    """Yield the keys and values that context-parallel ranks send around a ring, with their gradients in the backward.

    zeroplan counts ``cp_comm_type p2p`` for every job.
    """
    keys = ceil_div(2 * element_of(recipe) * tokens * model.num_key_value_heads * model.head_dim, mesh.tp)
    steps = mesh.cp - 1
    yield _sent("keys and values around the ring", Phase.FORWARD, Among.SEQUENCE, mesh.cp, calls * steps, keys)
    yield _sent(
        "keys and values around the ring", Phase.BACKWARD, Among.SEQUENCE, mesh.cp, (1 + forwards) * calls * steps, keys
    )


def _to_experts(rank: Rank, model: ModelSpec, recipe: RecipeSpec, mesh: Mesh, batch: Batch) -> Iterator[Collective]:
    assert model.moe is not None  # noqa: S101  asked of models with experts only
    forwards = 2 if recipe.recompute == "full" else 1
    tokens = own_part(batch.micro_batch_size * batch.seq_len, recipe, mesh)
    payload = element_of(recipe) * tokens * model.moe.num_experts_per_tok * model.hidden_size
    counts = zip(runs_of(model, recipe), rank.counts, strict=True)
    calls = batch.grad_accum_steps * sum(layers for run, layers in counts if run.kind in ROUTED)
    yield _call("all_to_all", "tokens", Phase.FORWARD, Among.EXPERTS, mesh.ep, 2 * calls, payload)
    yield _call("all_to_all", "tokens", Phase.BACKWARD, Among.EXPERTS, mesh.ep, 2 * forwards * calls, payload)


def _call(
    operation: str, what: str, phase: Phase, among: Among, ranks: Int, calls: Int, payload: Int, *, passes: int = 1,
    near: bool = False,
) -> Collective:  # fmt: skip
    """Return a collective of a group. Each rank keeps its own part of the payload and sends the others."""
    sent = calls * passes * (payload - payload // ranks)
    volume = where(ranks > 1, passes * calls * payload // 2, 0)
    when = "after the step" if phase is Phase.STEP else phase.value
    return Collective(operation, what, when, ranks, calls, payload, sent, volume, VOLUME, near=near, phase=phase, among=among)


def _sent(what: str, phase: Phase, among: Among, ranks: Int, calls: Int, payload: Int) -> Collective:
    """Return a send of the whole payload from one rank to another."""
    sent: Int = calls * payload
    return Collective("send", what, phase.value, ranks, calls, payload, sent, sent // 2, VOLUME, phase=phase, among=among)
