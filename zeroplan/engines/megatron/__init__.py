"""The memory and traffic of a Megatron-Core job: what each pipeline rank holds, and at which moments.

With ``bf16-mixed`` a rank holds bf16 weights, fp32 main gradients, an fp32 copy of the weights and Adam's moments. The distributed
optimizer splits the copy and the moments over the data- and context-parallel ranks. Megatron-FSDP also splits gradients, and at
stage 3 weights (``sharded.py``).

A program per layer (``zeroplan/transformer/families/megatron/``) gives the activations that the layer keeps, and the peak of its
backward. Megatron's schedules give the micro-batches in flight. zeroplan computes every pipeline rank and reports the one with the
highest peak.

Left out: padding of buckets (each to a multiple of 128 and of the ranks), temporary buffers of collectives, CUDA graphs, FP8's
history of largest values, and the padding of experts' tokens for FP8.
"""

from zeroplan.engines.account import Account, PipelineRank
from zeroplan.engines.megatron.chunks import chunks_per_rank, runs_of
from zeroplan.engines.megatron.inputs import TOWER_NOTE, tower_weights
from zeroplan.engines.megatron.moments import moments_of
from zeroplan.engines.megatron.parameters import ADAPTERS_NOTE, GRADIENTS_TOO
from zeroplan.engines.megatron.rank import Rank, rank_of
from zeroplan.engines.megatron.states import host_lines, states_of
from zeroplan.engines.megatron.symbols import symbols_of
from zeroplan.engines.megatron.traffic import collectives_of
from zeroplan.ledger import Line
from zeroplan.spec.batch import Batch
from zeroplan.spec.described import Job, JobParts
from zeroplan.spec.megatron import chunks_of, cut_flags
from zeroplan.spec.mesh import Mesh
from zeroplan.spec.model import ModelSpec
from zeroplan.spec.recipe import RecipeSpec
from zeroplan.trace import Moments
from zeroplan.transformer.megatron import Layers, layers_of
from zeroplan.weights import ONE_POOL

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
_LAST_NOTE = (
    "the loss of each sequence's last token is read from mcore-bridge's code, not run; the step time counts a whole head for it"
)
_BESIDE_NOTE = "nanotron's gradients in 16 bits are read from its code, not run"
_HYBRID_OPTIMIZER_NOTE = (
    "the optimizer in host memory is read from Megatron-Core's code, not run; the step time is not modelled with it"
)
_PREDICTING_NOTE = "multi-token prediction is on the last pipeline rank; the step time is not modelled with it"


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
    job, last = JobParts(model, recipe, mesh, batch), int(mesh.pp) - 1
    before = _layers(job, received=True) if last else None
    layers = _layers(job, received=chunks_per_rank(job) > 1)
    ranks = (rank_of(at, job) for at in range(last + 1))
    return tuple(_of_rank(rank, layers if before is None or rank.has_head else before, job) for rank in ranks)


def memory_of_rank(at: int, job: Job) -> Account:
    """Return the states and moments of one pipeline rank, without its traffic, for a search. [bytes]

    Of the ranks between the first and the last with the same layers, the first of them needs most.
    """
    layers = _layers(job, received=at < int(job.mesh.pp) - 1 or chunks_per_rank(job) > 1)
    states = states_of_rank(at, job)
    return Account(states, moments_of(rank_of(at, job), layers, job, states), ())


def states_of_rank(at: int, job: Job) -> tuple[Line, ...]:
    """Return the states of one pipeline rank, a lower bound of its memory that is quick to find. [bytes]"""
    rank = rank_of(at, job)
    return *states_of(rank, job), *tower_weights(rank, job)


def _layers(job: Job, *, received: bool) -> Layers:
    """Return the memory of a rank's layers. ``received``: another chunk sends the gradient of their output."""
    return layers_of(job, tuple(run.kind for run in runs_of(job)), received=received)


def _of_rank(rank: Rank, layers: Layers, job: Job) -> Account:
    model, recipe = job.model, job.recipe
    states = states_of_rank(rank.at, job)
    moments = moments_of(rank, layers, job, states)
    return Account(
        states,
        moments,
        tuple(collectives_of(rank, job)),
        symbols=tuple(symbols_of(rank, layers, job)) if isinstance(job.batch.micro_batch_size, int) else (),
        notes=(
            NOTE,
            *((_EXPERTS_NOTE if recipe.imbalance == 1 else _UNEVEN_NOTE,) if model.moe is not None else ()),
            *((ADAPTERS_NOTE,) if model.adapter is not None else ()),
            *((_ALIBI,) if model.traits.alibi else ()),
            *((TOWER_NOTE,) if model.vision is not None else ()),
            *((_HYBRID_NOTE,) if recipe.megatron.hybrid_layer_pattern is not None else ()),
            *((_SHARDED_NOTE,) if recipe.zero_stage >= GRADIENTS_TOO else ()),
            *((_FP8_NOTE,) if recipe.megatron.fp8_format is not None else ()),
            *((_ROWS_NOTE,) if model.head_rows is not None else ()),
            *((_LAST_NOTE,) if recipe.megatron.last_tokens is not None else ()),
            *((_VERLS_NOTE,) if recipe.megatron.cross_entropy_fusion_impl == "verl" else ()),
            *((_BESIDE_NOTE,) if recipe.megatron.gradients_beside or not recipe.megatron.main_weights else ()),
            *((_PREDICTING_NOTE,) if recipe.megatron.mtp_num_layers else ()),
            *((_HYBRID_OPTIMIZER_NOTE,) if recipe.megatron.optimizer_offload_fraction else ()),
            *_notes_of_cut(job),
            *{"gpt": (), "bert": (_BERT_NOTE,), "t5": (_T5_NOTE,)}[recipe.megatron.pretrains],
        ),
        host=tuple(host_lines(rank, job)),
        kept=tuple((kind, one.kept) for kind, one in layers.kinds.items()),
        pipeline=(_shown(rank, moments),),
    )


def _shown(rank: Rank, moments: Moments) -> PipelineRank:
    """Return the rank's row in the answer's table of pipeline ranks."""
    blocks = "; ".join(f"blocks {one.start + 1} to {one.stop}" for one in rank.stages if one.layers)
    named = (*(["embedding"] if rank.at == 0 else []), blocks, *(["norm and head"] if rank.has_head else []))
    words = ", ".join(name for name in named if name)
    if moments.are_columns:
        return PipelineRank(rank.at, words, 0, moments.highest(ONE_POOL).peak_bytes, "")
    highest = moments.peak()
    return PipelineRank(rank.at, words, int(rank.elements + rank.experts + rank.frozen), highest.total_bytes, highest.name)


def _notes_of_cut(job: Job) -> tuple[str, ...]:
    """Return a note on how an uneven pipeline is cut, unless the user sets the cut."""
    flags = cut_flags(chunks_of(job.model.num_hidden_layers, int(job.mesh.pp) * chunks_per_rank(job)))
    if job.recipe.pipeline_layers is not None or not flags:
        return ()
    return (f"embedding and loss count as a layer each ({' '.join(flags)}), since the layers alone do not divide",)
