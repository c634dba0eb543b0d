"""How many parameters does one rank have, in its layers and around them?"""

from functools import lru_cache

from zeroplan.engines.megatron.chunks import runs_of, without_adapters
from zeroplan.numeric import Int, ceil_div, round_up
from zeroplan.spec.described import Job
from zeroplan.spec.family import LEARNED_POSITIONS
from zeroplan.transformer.megatron import ROUTED, UNGATED, is_gated
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
    found: Int = 0
    for run, layers in zip(runs_of(job), counts if job.recipe.megatron.fp8_format is not None else (), strict=False):
        for parameter in run.parameters:
            if multiplies_in_fp8(parameter):
                found = found + layers * of_one_rank(parameter, job)
        found = found + layers * of_shared_expert(run.kind, job)
    return found


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
    if job.model.family in UNGATED or is_gated(job):
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
