"""Which tensors does Megatron-Core allocate once and keep?"""

from collections.abc import Iterator

from zeroplan.engines.megatron.adapters import of_each_shape as of_adapters
from zeroplan.engines.megatron.chunks import chunks_per_rank, runs_of
from zeroplan.engines.megatron.parameters import head_of, is_expert, is_split, of_one_rank, of_shared_expert
from zeroplan.engines.megatron.rank import Rank
from zeroplan.ledger import Kind, Line, OffGpu, Tag
from zeroplan.numeric import Int, ceil_div, maximum
from zeroplan.spec.described import Job
from zeroplan.spec.family import UNROTATED
from zeroplan.spec.recipe import RecipeSpec
from zeroplan.transformer.megatron import Layers, element_of, keeps_placeholders

ANGLES = "Megatron-LM 2026-08, megatron/core/models/common/embeddings/rotary_pos_embedding.py, RotaryEmbedding.forward"
BUFFER = "Megatron-LM 2026-08, megatron/core/utils.py, GlobalMemoryBuffer.get_tensor (name mpu)"
STAND_INS = "Transformer Engine 2026-08, pytorch/module/base.py, get_dummy_wgrad"
_KEPT = Tag(off_gpu=OffGpu.KEPT)


def buffer_lines(rank: Rank, layers: Layers, job: Job) -> Iterator[Line]:
    """Yield the tensors that Megatron-Core allocates once and keeps. [bytes]

    They are one buffer for attention scores and gathered tokens, and Transformer Engine's placeholders for weight gradients.
    """
    recipe = job.recipe
    needs = {**_scores(recipe), **_gathered(rank, job)}
    sizes = tuple(layers.value(name) * (1 if width == "" else job.model.hidden_size) for name, width in needs.items())
    elements = maximum(*sizes) if len(sizes) > 1 else sum(sizes)
    if needs and not (isinstance(elements, int) and not elements):
        several = ", ".join(f"{width}{name}" for name, width in needs.items())
        formula = f"e·max({several})" if len(needs) > 1 else f"e·{several}"
        reason = "buffer of attention scores, one for all layers" if _scores(recipe) else "buffer of gathered tokens"
        yield Line(Kind.WORKSPACE, element_of(recipe) * elements, reason, formula, BUFFER, _KEPT)
    if keeps_placeholders(recipe):
        yield _stand_ins(rank, job)


def rotary_tables(layers: Layers, job: Job) -> Iterator[Line]:
    """Yield the rotary angles of all positions in fp32. Every chunk of layers makes them once. [bytes]"""
    model = job.model
    if (
        model.positions
        or model.mla is not None
        or model.family in UNROTATED
        or job.recipe.megatron.hybrid_layer_pattern is not None
    ):
        return
    chunks = chunks_per_rank(job)
    yield Line(Kind.ACTIVATIONS, 4 * chunks * layers.value("R_r"), "angles of rotary positions", f"{4 * chunks}·R_r", ANGLES)


def _scores(recipe: RecipeSpec) -> dict[str, str]:
    """Return the symbols of the attention scores that local layers write into Megatron's buffer."""
    if recipe.megatron.transformer_impl != "local":
        return {}
    return dict.fromkeys(("S_r", "S_e", "S_c") if recipe.megatron.pretrains == "t5" else ("S_r",), "")


def _gathered(rank: Rank, job: Job) -> dict[str, str]:
    """Return the symbols of the tokens gathered into the buffer, with the width of each.

    Megatron's own matrices gather their input there, and so does the all-gather dispatcher of experts.
    """
    own_matrices = rank.has_head or job.recipe.megatron.transformer_impl == "local"
    gathers_for_experts = job.model.moe is not None and job.recipe.megatron.moe_token_dispatcher_type == "allgather"  # noqa: S105
    return {**({"T_w": "h·"} if own_matrices else {}), **({"T_a": "h·"} if gathers_for_experts else {})}


def _stand_ins(rank: Rank, job: Job) -> Line:
    """Return the placeholders that Transformer Engine gives to autograd instead of weight gradients. [bytes]

    The real gradients are in the main gradients already. Transformer Engine keeps one placeholder for each shape of a matrix.
    """
    reason = "placeholders for gradients that matrices accumulate themselves, one per shape"
    return Line(Kind.WORKSPACE, element_of(job.recipe) * of_each_shape(rank, job), reason, "e·M", STAND_INS)


def of_each_shape(rank: Rank, job: Job) -> Int:
    """Return the elements of one matrix of each shape: in attention, dense MLP, one expert and the head."""
    if job.model.adapter is not None:
        return of_adapters(job, rank.counts, has_head=rank.has_head)
    found: dict[str, Int] = {}
    for run in (run for run, here in zip(runs_of(job), rank.counts, strict=True) if here):
        for parameter in run.parameters:
            if is_expert(parameter) and job.model.moe is not None:
                found[parameter.name] = ceil_div(of_one_rank(parameter, job) * job.mesh.ep, job.model.moe.num_experts)
            elif is_split(parameter.name) and not parameter.name.endswith(".bias"):
                found[parameter.name] = of_one_rank(parameter, job)
        found["shared expert"] = maximum(found.get("shared expert", 0), of_shared_expert(run.kind, job))
    own = job.recipe.megatron  # verl's kernels and a product with two rows return the gradient of the head's weight
    of_head = rank.has_head and own.cross_entropy_fusion_impl != "verl" and own.last_tokens is None
    elements: Int = head_of(job)[0] if of_head else 0
    for each in found.values():
        elements = elements + each
    return elements
