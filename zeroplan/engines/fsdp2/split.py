"""The traffic among tensor-parallel and among context-parallel ranks in a step under FSDP2."""

from collections.abc import Iterable

from zeroplan.engines.fsdp2.plan import FINAL_NORM, REDUCE, Plan
from zeroplan.engines.fsdp2.traffic import KEYS
from zeroplan.engines.precisions import widths
from zeroplan.ledger import Among, Collective, Phase
from zeroplan.numeric import Int, where
from zeroplan.spec.adapter import AdapterSpec
from zeroplan.spec.batch import Batch
from zeroplan.spec.family import TRAITS
from zeroplan.spec.mesh import Mesh, Split
from zeroplan.spec.model import ModelSpec
from zeroplan.spec.recipe import RecipeSpec
from zeroplan.spec.traits import ATTENTION
from zeroplan.transformer.families.ending import PARALLEL
from zeroplan.transformer.families.experts import COMBINE, DISPATCH
from zeroplan.transformer.families.ring import BACKWARD, FORWARD
from zeroplan.transformer.families.sharded import GATHER, SCATTER
from zeroplan.transformer.parameters import Parameter

#: The payloads of tensor-parallel collectives, in words.
ACTIVATIONS, ROWS, NORMS = "activations", "sums over the vocabulary", "gradients of norms"
OUTPUTS, TOKENS, WEIGHTS = "outputs of experts", "gradients of the experts' tokens", "gradients of routing weights"


def split_collectives(
    plan: Plan, batch: Batch, model: ModelSpec, ranks: int, *, reductions: Int, embeds: bool = True, ends: bool = True,
    accumulated: bool = False,
) -> tuple[Collective, ...]:  # fmt: skip
    """Return the traffic among tensor-parallel ranks in one optimizer step.

    Each block gathers the inputs and scatters the outputs of its two branches. A recomputation does so again, until it reaches
    the last saved tensor: it skips the MLP's output, unless it keeps the outputs of every second product and so runs to the
    end. A pipeline stage may have no embedding (``embeds``), or no head and loss (``ends``), and its gradients are
    ``accumulated`` when norms' are all-reduced. Torch 2.15 sums them in the reduction's dtype
    (``FSDPParam.may_reduce_grad_outside_dp``).
    """
    layers, passes = sum(plan.every_layer), batch.grad_accum_steps
    if not plan.recipe.fsdp2.sequence_parallel:
        whole_states = _of_whole_sequences(plan, batch, model, ranks, embeds=embeds, ends=ends)
        return (*whole_states, *_of_adapters(plan, batch, model.adapter, ranks))
    tokens = batch.micro_batch_size * batch.seq_len
    whole, e = tokens * plan.parameters[0].shape[1], plan.width.compute
    twice = sum(run.layers for run in plan.runs if not run.plain)
    again = {"none": (0, 0), "full": (2 * twice, twice), "selective": (2 * twice, 2 * twice)}[plan.recipe.recompute]
    before, after = 2 * layers + embeds, 2 * layers + ends
    routed, rerouted = _with_experts(plan)
    beside = () if not routed else _of_experts(plan, batch, model, ranks, (passes * routed, passes * rerouted))
    norms, elements = _norms(plan)
    reduced = plan.reduce_bytes if accumulated or plan.cast_on_arrival else e

    def of(operation: str, phase: Phase, calls: Int, source: str) -> Collective:
        return _among(operation, ACTIVATIONS, phase, ranks, calls, whole, e, source)

    return (
        of("all_gather", Phase.FORWARD, passes * after, GATHER),
        of("reduce_scatter", Phase.FORWARD, passes * (before - routed), SCATTER),
        _among("all_reduce", ROWS, Phase.FORWARD, ranks, 3 * passes * ends, tokens, 4, PARALLEL),
        of("all_gather", Phase.BACKWARD, passes * (before + again[0]), GATHER),
        of("reduce_scatter", Phase.BACKWARD, passes * (after - routed + again[1] - rerouted), SCATTER),
        *beside,
        _among("all_reduce", NORMS, Phase.BACKWARD, ranks, reductions * norms, elements // norms, reduced, REDUCE)._replace(
            of_all=reductions * reduced * elements
        ),
    )


def _of_whole_sequences(
    plan: Plan, batch: Batch, model: ModelSpec, ranks: int, *, embeds: bool, ends: bool
) -> tuple[Collective, ...]:  # fmt: skip
    """Return the sums of whole hidden states: of each branch's output, and of the gradient of each matrix's input.

    Q, k and v projections, gate and up projections, and the head sum one each. A recomputation sums outputs again. Beside adapters
    no gradient reaches the first layer's input, nor the input of its MLP if its attention has none.
    """
    layers, passes, e = sum(plan.every_layer), batch.grad_accum_steps, plan.width.compute
    twice = sum(run.layers for run in plan.runs if not run.plain)
    again = {"none": 0, "full": twice, "selective": 2 * twice}[plan.recipe.recompute]
    tokens = batch.micro_batch_size * batch.seq_len
    whole = tokens * plan.parameters[0].shape[1]
    read = _READERS * layers
    if model.adapter is not None:
        read -= _READERS - (_READERS_OF_THE_MLP if set(model.adapted_layers) & set(ATTENTION) else 0)
    forward, backward = passes * (2 * layers + embeds), passes * (read + ends + again)
    return (
        _among("all_reduce", ACTIVATIONS, Phase.FORWARD, ranks, forward, whole, e, SUMMED),
        _among("all_reduce", ROWS, Phase.FORWARD, ranks, 3 * passes * ends, tokens, 4, PARALLEL),
        _among("all_reduce", ACTIVATIONS, Phase.BACKWARD, ranks, backward, whole, e, SUMMED),
    )


SUMMED = "torch 2.13, torch/distributed/tensor/placement_types.py, Partial._reduce_value"
_READERS, _READERS_OF_THE_MLP = 5, 2
"""Matrices of a block that read whole hidden states, and those of them in its MLP."""
LOW_RANK = "products of adapters' first matrices"
_ROW_PARALLEL = ("o_proj", "down_proj")


def _of_adapters(plan: Plan, batch: Batch, adapter: AdapterSpec | None, ranks: int) -> tuple[Collective, ...]:
    """Return what adapters of layers that ranks split exchange between and for their matrices.

    Column-parallel: the ranks gather what the first matrix makes, and scatter the sum of its gradient. Row-parallel: DTensor sums
    and scatters that product, or gathers the second matrix if that is smaller. In the backward it gathers the product and its
    gradient, and scatters the second matrix's gradient.
    """
    if adapter is None:
        return ()
    layers, e = batch.grad_accum_steps * sum(plan.every_layer), plan.width.compute
    rows = sum(name in _ROW_PARALLEL for name in adapter.layers)
    columns, hidden = len(adapter.layers) - rows, plan.parameters[0].shape[1]
    made = batch.micro_batch_size * batch.seq_len * adapter.rank
    matrix = hidden * adapter.rank

    def of(operation: str, phase: Phase, calls: Int, elements: Int) -> Collective:
        return _among(operation, LOW_RANK, phase, ranks, layers * calls, elements, e, LORA)

    gathers = where(matrix < made, rows, 0)
    return (
        of("all_gather", Phase.FORWARD, columns, made),
        of("all_gather", Phase.FORWARD, gathers, matrix),
        of("reduce_scatter", Phase.FORWARD, rows - gathers, made),
        of("all_gather", Phase.BACKWARD, 2 * rows, made),
        of("reduce_scatter", Phase.BACKWARD, columns, made),
        of("reduce_scatter", Phase.BACKWARD, rows, matrix),
    )


LORA = "torch 2.13, torch/distributed/tensor/_collective_utils.py, redistribute_cost"


def least_collectives(model: ModelSpec, recipe: RecipeSpec, mesh: Mesh, batch: Batch) -> tuple[Collective, ...]:
    """Return a lower bound: the gathers and scatters of blocks, without experts, recomputation and ends."""
    calls = 2 * model.num_hidden_layers * batch.grad_accum_steps
    whole = batch.micro_batch_size * batch.seq_len // mesh.cp * model.hidden_size
    e, every = widths(recipe.precision).compute, (("all_gather", GATHER), ("reduce_scatter", SCATTER))
    return tuple(
        _among(operation, ACTIVATIONS, phase, int(mesh.tp), calls, whole, e, source)
        for phase in (Phase.FORWARD, Phase.BACKWARD)
        for operation, source in every
    )


def _with_experts(plan: Plan) -> tuple[int, int]:
    """Return the number of blocks with experts, and how many of them a selective recomputation runs to the end."""
    routed = [run for run, group in zip(plan.runs, plan.blocks, strict=True) if group.experts is not None]
    again = [run.layers for run in routed if not run.plain and plan.recipe.recompute == "selective"]
    return sum(run.layers for run in routed), sum(again)


def _of_experts(
    plan: Plan, batch: Batch, model: ModelSpec, ranks: int, calls: tuple[Int, Int]
) -> tuple[Collective, ...]:  # fmt: skip
    """Return the gathers around experts, whose tokens the ranks split: outputs, and gradients of tokens and weights.

    Every rank has the whole gradient of the MLP's input and takes its shard, so nothing is reduced there.
    """
    assert model.moe is not None  # noqa: S101  asked of blocks with experts only
    tokens, (routed, again) = batch.micro_batch_size * batch.seq_len, calls
    wide = 4 if TRAITS[model.family].routes_in_32_bits else plan.width.compute
    pairs, hidden = tokens * model.moe.num_experts_per_tok, tokens * model.hidden_size
    return (
        _among("all_gather", OUTPUTS, Phase.FORWARD, ranks, routed, hidden, wide, COMBINE),
        _among("all_gather", OUTPUTS, Phase.BACKWARD, ranks, again, hidden, wide, COMBINE),
        _among("all_gather", TOKENS, Phase.BACKWARD, ranks, routed, hidden, plan.width.compute, DISPATCH),
        _among("all_gather", WEIGHTS, Phase.BACKWARD, ranks, routed, pairs, wide, DISPATCH),
    )


def _norms(plan: Plan) -> tuple[int, int]:
    """Return the number of norms, and the elements of their weights, which every rank holds whole."""
    outside = (one for one in plan.parameters if one.name.startswith(FINAL_NORM))
    found = [(1, one) for one in summed(outside)]
    found += [(run.layers, one) for run in plan.runs for one in summed(run.parameters)]
    return sum(layers for layers, _ in found), sum(layers * numel for layers, numel in found)


def summed(parameters: Iterable[Parameter]) -> tuple[int, ...]:
    """Return the elements of each norm, whose gradients tensor-parallel ranks all-reduce (``_get_grad_inner_tensor``)."""
    return tuple([one.numel for one in parameters if "norm" in one.name])


def _among(
    operation: str, what: str, phase: Phase, ranks: int, calls: Int, elements: Int, width: int, source: str
) -> Collective:  # fmt: skip
    times = 2 if operation == "all_reduce" else 1
    payload: Int = width * elements
    sent: Int = times * calls * (payload // ranks) * (ranks - 1)
    return Collective(
        operation, what, phase.value, ranks, calls, payload, sent, times * calls * elements, source, near=True, phase=phase,
        among=Among.TENSOR,
    )  # fmt: skip


def exchanged(plan: Plan, batch: Batch, model: ModelSpec, mesh: Split) -> tuple[Collective, ...]:
    """Return the gathers of keys and values in forward, recomputation and backward, and the fp32 ring of their gradients.

    ``batch`` is one rank's. Each tensor-parallel rank has its heads, and exchanges them with the ranks that have the same
    heads. A selective recomputation keeps attention's outputs, and gathers nothing.
    """
    ranks, heads = int(mesh.cp), model.num_key_value_heads // int(mesh.tp)
    calls: Int = batch.grad_accum_steps * sum(plan.every_layer)
    elements = 2 * batch.micro_batch_size * batch.seq_len * heads * model.head_dim
    twice = sum(run.layers for run in plan.runs if not run.plain) if plan.recipe.recompute == "full" else 0
    again: Int = calls + batch.grad_accum_steps * twice
    payload: Int = plan.width.compute * ranks * elements
    each: Int = payload // ranks * (ranks - 1)
    round_trip: Int = 4 * elements
    return (
        Collective(
            "all_gather", KEYS, "forward", ranks, calls, payload, calls * each, calls * ranks * elements, FORWARD, near=True,
            phase=Phase.FORWARD, among=Among.SEQUENCE,
        ),
        Collective(
            "all_gather", KEYS, "backward", ranks, again, payload, again * each,
            again * ranks * elements, BACKWARD, near=True, among=Among.SEQUENCE,
        ),
        Collective(
            "all_to_all", f"gradients of {KEYS}", "backward", ranks, ranks * calls, round_trip, ranks * calls * round_trip,
            ranks * calls * elements, BACKWARD, near=True, among=Among.SEQUENCE,
        ),
    )  # fmt: skip
