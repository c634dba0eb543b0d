"""How many parameters does one rank have and train, in its layers and around them, and how many bytes does each take?"""

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from zeroplan.engines.megatron.chunks import runs_of, without_adapters
from zeroplan.errors import SpecError
from zeroplan.numeric import Int, added_up, ceil_div, round_up, weighted
from zeroplan.spec.described import Job, JobParts
from zeroplan.spec.family import LEARNED_POSITIONS
from zeroplan.spec.megatron import PRECISIONS
from zeroplan.spec.mesh import MeshSpec
from zeroplan.spec.recipe import Precision, RecipeSpec
from zeroplan.transformer.megatron import ROUTED, adapted_matrices, is_gated, shared_width, symbols_of
from zeroplan.transformer.parameters import Parameter


def elements_of(job: Job, counts: tuple[int, ...]) -> tuple[Int, Int, Int]:
    """Return a rank's parameters in its layers: outside experts, in experts, and outside experts in matrices."""
    beside: Int = 0
    experts: Int = 0
    matrices: Int = 0
    for run, layers in zip(runs_of(job), counts, strict=True):
        for parameter in run.parameters:
            mine = layers * of_one_rank(parameter, job)
            beside, experts = (beside, experts + mine) if is_expert(parameter) else (beside + mine, experts)
            matrices = matrices + mine * (len(parameter.shape) > 1 and not is_expert(parameter))
        shared = layers * of_shared_expert(run.kind, job)
        beside, matrices = beside + shared, matrices + shared
    return beside, experts, matrices


def in_fp8(job: Job, counts: tuple[int, ...]) -> Int:
    """Return the parameters in matrices that multiply in FP8: all of the layers' but the routers'. 0 without FP8."""
    if job.recipe.megatron.fp8_format is None:
        return 0
    runs = runs_of(job)
    each = (added_up(of_one_rank(one, job) for one in run.parameters if multiplies_in_fp8(one)) for run in runs)
    shared = (of_shared_expert(run.kind, job) for run in runs)
    return weighted(counts, each) + weighted(counts, shared)


def multiplies_in_fp8(parameter: Parameter) -> bool:
    """Whether a layer's parameter is a matrix that multiplies in FP8 under ``--fp8-format``: any but a router."""
    return len(parameter.shape) > 1 and "gate." not in f".{parameter.name}"


def of_shared_expert(kind: str, job: Job) -> Int:
    """Return a rank's parameters in the shared expert, which every token visits."""
    width = job.recipe.megatron.moe_shared_expert_intermediate_size if kind in ROUTED else None
    matrices = 3 if is_gated(job) else 2
    return 0 if width is None else ceil_div(matrices * width * job.model.hidden_size, job.mesh.tp)


def of_one_rank(parameter: Parameter, job: Job) -> Int:
    """Return the elements of a parameter on one rank.

    Expert-parallel ranks split the experts, and tensor-parallel ranks the matrices. Each rank has whole norms and routers.
    """
    mesh = job.mesh
    elements = _without_gates(parameter, job)
    if is_expert(parameter):
        return ceil_div(elements, mesh.ep * job.recipe.megatron.expert_ways(int(mesh.tp)))
    return ceil_div(elements, mesh.tp) if is_split(parameter.name) else elements


def _without_gates(parameter: Parameter, job: Job) -> int:
    """Return the elements of a parameter. Without ``--swiglu`` a gated family's MLPs have no gate."""
    if not job.model.traits.gated or is_gated(job):
        return parameter.numel
    if parameter.name.endswith("gate_up_proj"):
        return parameter.numel // 2
    return 0 if "gate_proj" in parameter.name else parameter.numel


#: Row-parallel matrices, whose outputs the tensor-parallel ranks sum.
BY_ROWS = ("o_proj", "down_proj", "c_proj", "dense", "dense_4h_to_h")


def is_expert(parameter: Parameter) -> bool:
    """Whether the parameter belongs to a routed expert, which only some tokens visit."""
    return parameter.active_share != (1, 1)


#: Matrices that every tensor-parallel rank has whole, and does not sum over.
_WHOLE = ("gate", "shared_expert_gate", "q_a_proj", "kv_a_proj_with_mqa")


@lru_cache(maxsize=1024)
def is_split(name: str) -> bool:
    """Whether tensor-parallel ranks split the parameter of this name."""
    module = name.rpartition(".")[0].rpartition(".")[2]
    if "norm" in module or module.startswith("ln_") or module in _WHOLE:
        return False
    return not (name.endswith(".bias") and module in BY_ROWS)  # a row-parallel matrix adds its bias after the ranks' sum


def ends_of(job: Job) -> tuple[Int, Int]:
    """Return a rank's parameters before and after the layers: the embedding; the final norm and an untied head."""
    model = job.model
    tree, table = without_adapters(model), table_of(job)
    positions = sum(parameter.numel for parameter in tree.embeddings[1:])
    if model.family not in LEARNED_POSITIONS:  # Megatron-LM adds them to any model
        positions += model.positions * model.hidden_size
    norm = sum(parameter.numel for parameter in tree.tail if "norm" in parameter.name or "ln_" in parameter.name)
    types, more = _of_script(job)
    return table + positions + types, norm + more + (0 if model.tie_word_embeddings else head_of(job)[0])


def _of_script(job: Job) -> tuple[Int, Int]:
    """Return the further parameters of BERT and T5 before and after the layers.

    Before: the embedding of BERT's two token types. After: BERT's heads, or the final norm of T5's encoder, and the logits' bias.
    """
    script, hidden = job.recipe.megatron.pretrains, job.model.hidden_size
    bias = ceil_div(padded_vocabulary(job), job.mesh.tp)
    if script == "gpt":
        return 0, 0
    if script == "t5":
        return 0, 2 * hidden + (bias if job.model.tie_word_embeddings else 0)
    dense = hidden * hidden + hidden
    binary = job.recipe.megatron.bert_binary_head
    return 2 * hidden if binary else 0, dense + 2 * hidden + bias + (dense + 2 * hidden + 2 if binary else 0)


def table_of(job: Job) -> Int:
    """Return a rank's elements of the embedding's table."""
    return ceil_div(padded_vocabulary(job) * job.model.hidden_size, job.mesh.tp)


def head_of(job: Job) -> tuple[Int, str]:
    """Return the elements of the head's weight on a rank, and the formula. Every rank has a head of few outputs whole.

    Source: verl b178a3cd, models/mcore/model_initializer.py, LinearForLastLayer; mcore-bridge 1.6.5, model/gpt_model.py,
    OutputLayerLinear.
    """
    model = job.model
    if job.recipe.megatron.last_tokens == "embedding":
        return 0, "0"
    if model.head_rows is None:
        return table_of(job), "ceil(V_p·h/p)"
    return model.head_rows * model.hidden_size, f"{model.head_rows}·h"


def has_tied_head(job: Job) -> bool:
    """Whether the head multiplies by the embedding's table. Embeddings of whole sequences have no head."""
    return job.model.tie_word_embeddings and job.recipe.megatron.last_tokens != "embedding"


def padded_vocabulary(job: Job) -> Int:
    """Return the padded vocabulary size (``--make-vocab-size-divisible-by``). [tokens]"""
    return round_up(job.model.vocab_size, job.recipe.megatron.make_vocab_size_divisible_by * job.mesh.tp)


#: Megatron-FSDP's stages: ``optim_grads`` and ``optim_grads_params``.
GRADIENTS_TOO, WEIGHTS_TOO = 2, 3


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
_WITHOUT_MAIN_WEIGHTS = Bytes(2, 2, 0, 0, "bf16")
"""bf16 in nanotron without ``accumulate_grad_in_fp32``."""
_BYTES: dict[Precision, Bytes] = {
    "bf16-mixed": Bytes(2, 4, 4, 0, "bf16"),
    "fp16-mixed": Bytes(2, 2, 4, 4, "fp16"),
    "fp32": Bytes(4, 4, 0, 0, "fp32"),
}
WIDTHS = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8": 1}


def bytes_of(recipe: RecipeSpec) -> Bytes:
    """Return the bytes per parameter. Raises SpecError for a precision that is not modelled.

    A search calls this before it builds jobs; the check of a job refuses the same precisions.
    """
    options = recipe.megatron
    if recipe.precision not in _BYTES:
        known = ", ".join(PRECISIONS)
        raise SpecError(f"engine 'megatron' with precision {recipe.precision!r} is not modelled; use one of {known}")
    if options.use_precision_aware_optimizer:
        return _aware(recipe)
    if not options.main_weights:
        return _WITHOUT_MAIN_WEIGHTS
    found = _NARROW if recipe.precision == "bf16-mixed" and options.grad_reduce_in_bf16 else _BYTES[recipe.precision]
    return found._replace(master=4) if recipe.zero_stage >= GRADIENTS_TOO else found  # Megatron-FSDP also copies fp32 weights


def _aware(recipe: RecipeSpec) -> Bytes:
    """Return the bytes per parameter with the precision-aware optimizer.

    During the step it casts moments and main weights that are not fp32 to fp32. Two bf16 moments stay as they are.
    """
    options, plain = recipe.megatron, _BYTES[recipe.precision]
    narrow = recipe.precision == "fp16-mixed" or options.grad_reduce_in_bf16 or options.main_grads_dtype == "bf16"
    if options.optimizer_offload_fraction:  # HybridDeviceOptimizer: fp32 states, and fp32 copies of narrow gradients
        return plain._replace(gradient=2 if narrow else 4, master=4, at_step=4 * narrow)
    # with FP8 weights that have scales of their own the main weights are whole (use_precision_aware_optimizer_no_fp8_or_ds_fp8)
    whole = options.fp8_format is not None and options.fp8_recipe != "delayed"
    halved = (recipe.precision == "bf16-mixed" and not whole) or options.main_params_dtype == "fp16"
    moments = (options.exp_avg_dtype, options.exp_avg_sq_dtype)
    widened = 0 if moments == ("bf16", "bf16") else sum(dtype != "fp32" for dtype in moments)
    widened += options.main_params_dtype != "fp32"
    return plain._replace(gradient=2 if narrow else 4, master=2 if halved else 4, at_step=4 * widened)


# --- adapters ---------------------------------------------------------------------------------------------------------------

ADAPTERS_NOTE = (
    "adapters follow mcore-bridge's code, compared with runs on Megatron-Core's own matrices; those of Transformer Engine and of "
    "grouped experts are read, not run; the step time is not modelled with them"
)


def trained_by(job: Job, counts: tuple[int, ...], *, is_first: bool, is_last: bool) -> tuple[Int, Int]:
    """Return the parameters that a rank trains: outside experts, with modules trained whole, and in adapters of experts.

    Source: mcore-bridge 1.6.5, tuners/lora.py, LoraParallelLinear.update_layer: each tensor-parallel rank has the whole of the
    matrix that reads or makes what these ranks do not split.
    """
    beside: Int = sum(_of_modules(job, is_first=is_first, is_last=is_last))
    experts: Int = 0
    for run, layers in zip(runs_of(job), counts, strict=True):
        once, each = _of_a_layer(job, routed=any(map(is_expert, run.parameters)))
        beside, experts = beside + layers * once, experts + layers * each
    return beside, experts


def _of_modules(job: Job, *, is_first: bool, is_last: bool) -> Iterator[Int]:
    """Yield the elements of the modules that this rank trains whole, in copies."""
    adapter = job.model.adapter
    if adapter is not None and is_first and adapter.trains("embedding"):
        yield table_of(job)
    if adapter is not None and is_last and adapter.trains("head"):
        yield head_of(job)[0]


def trained_count(job: Job) -> int:
    """Return the number of parameters that all ranks train together. [elements]"""
    whole = JobParts(job.model, job.recipe, MeshSpec(), job.batch)
    return int(sum(trained_by(whole, tuple(run.layers for run in runs_of(whole)), is_first=True, is_last=True)))


def adapters_of_each_shape(job: Job, kinds: tuple[int, ...], *, has_head: bool) -> Int:
    """Return the elements of one trained matrix of each shape, of adapters and of a head that is trained whole.

    ``kinds``: the number of layers of each kind. Adapters of the same shape in layers of several kinds are counted more than once.
    """
    found: Int = sum(_of_modules(job, is_first=False, is_last=has_head))
    for run, here in zip(runs_of(job), kinds, strict=True):
        if here:
            found = found + sum(_of_a_layer(job, routed=any(map(is_expert, run.parameters)), experts=1))
    return found


def _of_a_layer(job: Job, *, routed: bool, experts: int | None = None) -> tuple[Int, Int]:
    """Return a rank's parameters in the adapters of one layer: outside experts, and of its ``experts``, or else all of them."""
    model, names = job.model, adapted_matrices(job.model)
    at = {one.name: one.value for one in symbols_of(job)}
    hidden, rank = model.hidden_size, 0 if model.adapter is None else model.adapter.rank

    def of_mlp(width: Int) -> Int:
        return ("linear_fc1" in names) * (hidden + at["g_m"] * width) + ("linear_fc2" in names) * (width + hidden)

    beside: Int = ("linear_qkv" in names) * (hidden + at["q_r"] + at["k_r"] + at["v_r"])
    beside = beside + ("linear_proj" in names) * (at["c_r"] + hidden)
    if not routed:
        return rank * (beside + of_mlp(at["f_r"])), 0
    shared = of_mlp(at["f_s"]) if shared_width(job) else 0
    return rank * (beside + shared), rank * (at["E_r"] if experts is None else experts) * of_mlp(at["m_r"])
