"""The work of one micro-batch on a GPU: matrix products by shape, attention, and bytes that other operators move."""

from dataclasses import replace
from typing import NamedTuple

from zeroplan.engines.precisions import compute_of, widths
from zeroplan.ledger import total_bytes
from zeroplan.numeric import Float, together
from zeroplan.spec.batch import Batch, BatchSpec
from zeroplan.spec.model import ModelSpec
from zeroplan.spec.recipe import RecipeSpec, StepKernels
from zeroplan.steptime import pointwise
from zeroplan.steptime.pointwise import Moved, Split
from zeroplan.steptime.products import Product, of_block, of_head
from zeroplan.steptime.scans import Scan, moving, scan_of
from zeroplan.transformer.activations import block_pass
from zeroplan.transformer.flops import attention_layers, attention_widths, linear_attention_flops
from zeroplan.transformer.head import head_pass
from zeroplan.transformer.parameters import Layout, plain_kind
from zeroplan.transformer.params import is_frozen, layout

#: Traffic per saved byte of a traced module: one operator writes the tensor and the next reads it. The backward reads it, reads the
#: incoming gradient and writes the outgoing one.
_SAVED_FORWARD, _SAVED_BACKWARD = 2.0, 3.0


class Core(NamedTuple):
    """Attention between queries and keys, of all layers on a rank."""

    flops: Float = 0.0
    """Scores and their product with the values, without the part that a causal kernel skips. [FLOPs]"""
    heads: Float = 1.0
    """Heads of the whole micro-batch."""
    width: int = 128
    """Width of one head."""
    tokens: float = 1.0
    """Keys that one kernel reads."""
    moved: Moved = Moved()
    """Memory traffic of eager attention's scores."""


class Work(NamedTuple):
    """The work of one micro-batch's forward and backward on one GPU; columns for several sizes of micro-batch."""

    tokens: Float
    products: tuple[Product, ...]
    """Linear layers of the blocks."""
    head: tuple[Product, ...]
    core: Core
    moved: Moved
    """Traffic of the blocks' operators, except products and attention."""
    ends_moved: Moved
    """Traffic of the embedding, the last norm and the loss."""
    other_flops: Float = 0.0
    """Operations in the blocks that are no linear layers: linear attention, a traced module. [FLOPs]"""
    other_head_flops: Float = 0.0
    scan: Scan | None = None
    """The recurrences behind ``other_flops``; without it the operations' shapes are not known."""
    layers: float = 0.0
    tensors: tuple[float, float] = (0.0, 0.0)
    """Numbers of the blocks' parameter tensors, and of those with a gradient."""
    again: tuple[Product, ...] = ()
    """Products of the modules in Megatron's ``--recompute-modules``; ``again_moved``: their other operators' traffic."""
    again_moved: Moved = Moved()
    wide_flops: Float = 0.0
    """Operations in fp32 in the blocks' forward that have no backward: the scores of sparse attention's indexer. [FLOPs]"""

    @property
    def elements(self) -> float:
        """Elements of the matrices on this rank."""
        return sum(one.columns * one.depth * one.times for one in (*self.products, *self.head))

    @property
    def trained(self) -> float:
        """Elements of the matrices that get a gradient."""
        return sum(one.columns * one.depth * one.times for one in (*self.products, *self.head) if not one.frozen)

    @property
    def blocks_flops(self) -> Float:
        """The blocks' matrix products in the forward. [FLOPs]"""
        return self.tokens * sum(one.flops for one in self.products) + self.other_flops

    @property
    def head_flops(self) -> Float:
        """The product that computes the logits, in the forward. [FLOPs]"""
        return self.tokens * sum(one.flops for one in self.head) + self.other_head_flops

    @property
    def flops(self) -> Float:
        """All operations of the forward. [FLOPs]"""
        return self.blocks_flops + self.head_flops + self.core.flops

    @property
    def model_flops(self) -> Float:
        """Operations of forward and backward that the model asks for: a frozen weight gets no gradient. [FLOPs]"""
        frozen = sum(one.flops for one in (*self.products, *self.head) if one.frozen)
        return 3.0 * self.flops - self.tokens * frozen


#: Kernels of a block's casts under autocast (DDP), counted in Llama, transformers 5.23; :func:`copies_of` has their bytes.
_CASTS = Moved(0.0, 0.0, 10.0, 16.0)


class Ranks(NamedTuple):
    """The numbers of ranks that split a micro-batch's work."""

    tp: int = 1
    cp: int = 1
    ep: int = 1


def work(
    model: ModelSpec, recipe: RecipeSpec, batch: Batch, kernels: StepKernels = "eager", *, tp: int = 1, cp: int = 1,
    expert_ranks: int = 1,
) -> Work:  # fmt: skip
    """Return the work of one micro-batch on one of ``tp`` x ``cp`` ranks that split it; columns if its size is a column.

    Tokens choose experts evenly. Leaves out sliding windows, which only some kernels skip; and dequantising weights in four bits.
    """
    if model.profile is not None:
        return _profiled(model, recipe, batch)
    whole, ranks = layout(_multiplied(model)), Ranks(tp, cp, expert_ranks)
    tokens = 1.0 * batch.micro_batch_size * batch.seq_len / cp
    split = Split(tokens, tp, sequence=tp > 1, ep=expert_ranks)
    products: tuple[Product, ...] = ()
    moved = Moved()
    for run in whole.runs:
        linear = of_block(run.parameters, run.layers, tp=tp, ep=expert_ranks, sharing=tp)
        one = pointwise.of_block(
            model, kernels, split, experts=plain_kind(model, run.kind).startswith("moe"), fused=recipe.fused_parts
        )
        one = one.and_of(multiplying(linear))
        if recipe.engine == "ddp" and model.adapter is None and widths(recipe.precision).name != "fp32":
            one = one.and_of(_CASTS)
        one = one.and_of(pointwise.of_adapters(model, run.parameters, tokens, autocast=_autocasts_adapters(model, recipe)))
        products, moved = products + linear, moved.and_of(Moved(*(run.layers * each for each in one)))
    scan = scan_of(model, batch, tp=tp, cp=cp, in_torch=recipe.linear_attention == "torch")
    scores, picking = _picking(whole, model, tokens, float(batch.seq_len))
    moved = moved.and_of(picking) if scan is None else moved.and_of(picking).and_of(moving(scan))
    head = of_head(model.vocab_size, model.hidden_size, tp=tp, frozen=model.adapter is not None and is_frozen(model, "head"))
    fused_loss = ("cross-entropy",) if recipe.loss == "fused" else ()
    return Work(
        tokens, products, head, core_of(model, recipe, batch, ranks, attention_layers(model)), moved,
        pointwise.of_ends(model, kernels, split, (*recipe.fused_parts, *fused_loss)).and_of(multiplying(head)),
        linear_attention_flops(model) * tokens / tp, scan=scan, layers=model.num_hidden_layers, tensors=_tensors(whole),
        wide_flops=scores,
    )  # fmt: skip


def _autocasts_adapters(model: ModelSpec, recipe: RecipeSpec) -> bool:
    """Whether the training loop runs adapters under autocast: DDP's does, and FSDP1's unless weights are in four bits."""
    mixed = widths(recipe.precision).mixed
    return mixed and (recipe.engine == "ddp" or (recipe.engine == "fsdp1" and not model.is_quantised))


def multiplying(products: tuple[Product, ...]) -> Moved:
    """Return the numbers of kernels of linear layers and attention; a layer's experts together are one kernel."""
    core = float(len(products) > 1)
    return Moved(0.0, 0.0, core + len(products), core + sum(2.0 - one.frozen for one in products))


def core_of(model: ModelSpec, recipe: RecipeSpec, batch: Batch, ranks: Ranks, layers: float) -> Core:
    """Return the attention of ``layers`` layers on one rank."""
    eager, seq_len = recipe.writes_out_attention(grouped=model.has_grouped_heads), float(batch.seq_len)
    tokens = batch.micro_batch_size * seq_len / ranks.cp
    masked = model.mla is not None and model.mla.index_n_heads > 0  # a mask of its own, of which no kernel skips a part
    keys = seq_len if eager or masked else (seq_len + 1) / 2.0
    scores = 2.0 * attention_widths(model) * keys * tokens / ranks.tp
    heads = batch.micro_batch_size * model.num_attention_heads / ranks.tp
    written = heads * seq_len * seq_len / ranks.cp if eager else 0.0
    fused = recipe.engine == "megatron" and recipe.megatron.masked_softmax_fusion
    moved = Moved().plus(_SCORES if fused else _SCORES_APART, written) if eager else Moved()
    return Core(layers * scores, heads, model.head_dim, seq_len / ranks.cp, Moved(*(layers * each for each in moved)))


#: Traffic of eager attention's scores with a fused softmax: the product writes them, softmax and dropout each read and write them,
#: the next product reads them; likewise in the backward, with a mask of one byte.
_SCORES = Moved(13, 17, 2, 2)
#: Traffic of the scores with separate operators for the mask and for a softmax in fp32.
_SCORES_APART = Moved(34, 40, 7, 8)


#: What transformers' indexer reads and writes per head of it and pair of tokens: fp32 scores are written, scaled, cut at zero and
#: summed over heads. Per pair of tokens: the sums are written, masked and searched for the highest (counted as four reads), and two
#: masks of one byte are made (transformers 5.23, models/deepseek_v32/modeling_deepseek_v32.py, ``DeepseekV32Indexer``; read, not
#: run).
_INDEX_SCORES, _INDEX_SUMS = Moved(24, 0, 4, 0), Moved(36, 0, 12, 0)


def _picking(whole: Layout, model: ModelSpec, tokens: Float, keys: float) -> tuple[Float, Moved]:
    """Return the operations and traffic of the indexers of sparse attention, which score all pairs of tokens."""
    if model.mla is None or not model.mla.index_n_heads:
        return 0.0, Moved()
    layers = sum(run.layers for run in whole.runs if any(".indexer." in one.name for one in run.parameters))
    heads, pairs = model.mla.index_n_heads, layers * tokens * keys
    moved = Moved().plus(_INDEX_SCORES, heads * pairs).plus(_INDEX_SUMS, pairs)
    kernels = layers * (_INDEX_SCORES.kernels + _INDEX_SUMS.kernels)
    return 2.0 * heads * model.mla.index_head_dim * pairs, moved._replace(kernels=kernels)


def _tensors(whole: Layout) -> tuple[float, float]:
    trained = sum(run.layers * sum(not one.frozen for one in run.parameters) for run in whole.runs)
    return 1.0 * sum(run.layers * len(run.parameters) for run in whole.runs), 1.0 * trained


class Copies(NamedTuple):
    """An engine's copies in a micro-batch's forward and backward. [bytes per matrix element]"""

    forward: float = 0.0
    backward: float = 0.0
    """Both: per element that the engine gathers."""
    trained_forward: float = 0.0
    trained_backward: float = 0.0
    """Both: on top, per element that gets a gradient."""


def copies_of(recipe: RecipeSpec) -> Copies:
    """Return the bytes that an engine copies per matrix element.

    FSDP2 copies every gathered weight out of the buffer (torch 2.13, ``_fsdp_collectives.py``, ``foreach_all_gather_copy_out``) and
    every gradient into the reduce-scatter's buffer (``foreach_reduce``). FSDP1 has views of one flat parameter, and casts gradients
    for the reduction. DDP runs under autocast, which casts weights, and copies gradients into buckets. DeepSpeed concatenates
    gathered shards (``_all_gather_dtype``), copies gradients into a bucket and divides it (``average_tensor``).
    """
    narrow = widths(recipe.precision).name != "fp32"
    reduced = {"fsdp2": recipe.fsdp2.reduce_dtype, "fsdp1": recipe.fsdp1.reduce_dtype}.get(recipe.engine)
    if recipe.engine in ("fsdp1", "fsdp2"):
        gathered = (4.0, 4.0 if recipe.zero_stage == 3 else 0.0) if recipe.engine == "fsdp2" else (0.0, 0.0)
        return Copies(*gathered, 0.0, 6.0 if reduced == "fp32" else 4.0)
    if recipe.engine == "ddp":
        into_buckets = 0.0 if recipe.ddp.gradient_as_bucket_view else 8.0
        return Copies(0.0, 0.0, 6.0 * narrow, 6.0 * narrow + into_buckets)
    if recipe.engine == "deepspeed":
        return Copies(*((4.0, 4.0) if recipe.zero_stage == 3 else (0.0, 0.0)), 0.0, 8.0)
    return Copies()


def _profiled(model: ModelSpec, recipe: RecipeSpec, batch: Batch) -> Work:
    """Return the work of a traced module, from its counted operations and its saved tensors."""
    from zeroplan.transformer.profiled import profile_of, profiled_operations, without_recompute  # noqa: PLC0415  keeps start-up fast

    profile, whole, compute = profile_of(model), layout(model), compute_of(recipe)
    done, plain = profiled_operations(profile, compute, batch), without_recompute(profile, compute)
    blocks = [(run.layers, block_pass(model, run.kind, plain, batch)) for run in whole.runs]
    ends = head_pass(model, compute, batch, loss=recipe.loss)
    saved = together(
        1.0 * layers * total_bytes(one.saved if plain.recompute == "none" else (*one.checkpoint, *one.selective))
        for layers, one in blocks
    )
    outside = 1.0 * total_bytes((*ends.saved, *ends.loss_forward))
    return Work(
        1.0 * batch.micro_batch_size * batch.seq_len, (), (), Core(1.0 * done.attention, 64.0, 128, float(batch.seq_len)),
        Moved(_SAVED_FORWARD * saved, _SAVED_BACKWARD * saved), Moved(_SAVED_FORWARD * outside, _SAVED_BACKWARD * outside),
        other_flops=1.0 * done.blocks, other_head_flops=1.0 * done.outside,
    )  # fmt: skip


def of_one(micro_batch: int, seq_len: int) -> BatchSpec:
    """Return a batch of one micro-batch."""
    return BatchSpec(seq_len=seq_len, micro_batch_size=micro_batch, grad_accum_steps=1)


def combined(several: tuple[Work, ...]) -> Work:
    """Return the summed work of one rank's stages."""
    first, *others = several
    for other in others:
        core, moved = first.core, first.core.moved.and_of(other.core.moved)
        first = Work(
            first.tokens,
            (*first.products, *other.products),
            (*first.head, *other.head),
            core._replace(flops=core.flops + other.core.flops, moved=moved),
            first.moved.and_of(other.moved),
            first.ends_moved.and_of(other.ends_moved),
            first.other_flops + other.other_flops,
            first.other_head_flops + other.other_head_flops,
            None,  # no pipeline has linear attention
            first.layers + other.layers,
            (first.tensors[0] + other.tensors[0], first.tensors[1] + other.tensors[1]),
            wide_flops=first.wide_flops + other.wide_flops,
        )
    return first


def without_head(whole: Work) -> Work:
    """Return the work without head and loss."""
    return whole._replace(head=(), ends_moved=Moved(), other_head_flops=0.0)


def _multiplied(model: ModelSpec) -> ModelSpec:
    """Return the model with weights as they are multiplied: dequantised, and with one of several adapters."""
    if model.adapter is None or (model.adapter.quantize == "none" and not model.adapter.runs):
        return model
    return replace(model, adapter=replace(model.adapter, quantize="none", runs=0, learning=None, looped=False))
