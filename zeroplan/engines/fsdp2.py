"""What does FSDP2 (``fully_shard``) allocate, and when?

Every block is one group, everything else (embedding, final norm, head) is the root group, as in PyTorch's own examples. Buffer
lifetimes end with Python references in host order, so the allocated bytes at every moment follow from the code of
``torch/distributed/fsdp/_fully_shard`` (torch 2.13); the estimate is for rank 0, whose dim-0 chunk is never the smaller one.

Left out: frozen parameters, other wrappings, explicit prefetching, CPU offload, and buffers of the process group itself.
"""

from collections.abc import Iterator
from typing import NamedTuple

from zeroplan.engines.account import Account, Symbol
from zeroplan.engines.optimizers import LocalTensor, implementation, state_lines, step_temporary_lines
from zeroplan.engines.positions import Position, corners
from zeroplan.engines.precisions import Widths, widths
from zeroplan.ledger import Collective, Kind, Line, Moment, Phase, total_bytes
from zeroplan.numeric import Int, ceil_div, maximum, where
from zeroplan.spec.batch import Batch
from zeroplan.spec.mesh import Mesh
from zeroplan.spec.model import ModelSpec
from zeroplan.spec.recipe import RecipeSpec
from zeroplan.transformer.activations import block_pass
from zeroplan.transformer.blocks import BackwardPoint, BlockPass, Compute, HeadPass
from zeroplan.transformer.head import head_pass
from zeroplan.transformer.parameters import Layout, Parameter
from zeroplan.transformer.params import layout

_SHARD = "torch 2.13 _fsdp_param.py FSDPParam._init_sharded_param"
_GATHER = "torch 2.13 _fsdp_collectives.py foreach_all_gather"
_COPY_OUT = "torch 2.13 _fsdp_collectives.py foreach_all_gather_copy_out"
_REDUCE = "torch 2.13 _fsdp_collectives.py foreach_reduce"
_PARKED = "torch 2.13 _fsdp_param_group.py FSDPParamGroup.wait_for_unshard"
_ACCUMULATE = "torch 2.13 _fsdp_param.py FSDPParam.to_accumulated_grad_if_needed"
_REPLICAS = "torch 2.13 _fsdp_param_group.py FSDPParamGroup._all_reduce_state"
_POST_FORWARD = "torch 2.13 _fsdp_param.py FSDPParam.to_sharded_post_forward"


class Group(NamedTuple):
    """One ``fully_shard`` unit. [elements]"""

    shard: Int
    """This rank's chunks, each parameter's dim 0 padded to a multiple of the ranks."""
    padded: Int
    """All ranks' chunks together: the size of an all-gather or reduce-scatter buffer."""
    numel: int
    """Without padding: what autograd's gradients measure."""
    symbol: str


class _Plan(NamedTuple):
    """Everything the moments are made of."""

    model: ModelSpec
    recipe: RecipeSpec
    width: Widths
    reduce_bytes: int
    n: Int
    gathers: Int
    """1 where there is more than one rank to gather from, else 0."""
    root: Group
    blocks: tuple[Group, ...]
    tail_elements: int
    tied_head_elements: int
    last_root_elements: int
    passes: tuple[BlockPass, ...]
    head: HeadPass
    kept: tuple[Int, ...]
    """Bytes each block of a run keeps from its forward to its backward."""
    persistent: tuple[Line, ...]
    left_shards: Int
    """Elements of sharded gradients that earlier micro-batches left, where each is reduced at once."""
    left_whole: Int
    """1 where earlier micro-batches left whole gradients (``no_sync``), else 0."""
    replicated: Int
    """1 with replicas (HSDP), else 0."""
    reshard: bool | int


def account(model: ModelSpec, recipe: RecipeSpec, mesh: Mesh, batch: Batch) -> Account:
    """Memory of rank 0 and traffic per step under FSDP2, stage 2 (``reshard_after_forward=False``) or 3.

    Source: the files named in each line; verified against real runs on CPU tensors with a fake process group.
    """
    plan = _plan(model, recipe, mesh, batch)
    states = (*plan.persistent, _gradient_shards(plan, _all_shards(plan), "after backward"))
    moments = (
        *_forward(plan),
        *_loss(plan),
        *_backward(plan),
        *_end_of_backward(plan),
        Moment("optimizer step", Phase.STEP, (*states, *_step_temporaries(plan))),
    )
    return Account(states, moments, _collectives(plan, mesh, batch), (), _symbols(plan))


# The plan


def _plan(model: ModelSpec, recipe: RecipeSpec, mesh: Mesh, batch: Batch) -> _Plan:
    tree, width, n = layout(model), widths(recipe.precision), mesh.dp_shard
    narrow = recipe.fsdp2.reduce_dtype == "param"
    compute = Compute(width.compute, autocast=False, attention=recipe.attention)
    passes = tuple(block_pass(model, run.kind, compute, batch) for run in tree.runs)
    root = _group((*tree.embeddings, *tree.tail), n, "root")
    blocks = tuple(_group(run.parameters, n, run.kind) for run in tree.runs)
    plan = _Plan(
        model=model,
        recipe=recipe,
        width=width,
        reduce_bytes=width.compute if narrow else width.stored,
        n=n,
        gathers=where(n > 1, 1, 0),
        root=root,
        blocks=blocks,
        tail_elements=sum(parameter.numel for parameter in tree.tail),
        tied_head_elements=tree.embeddings[0].numel if model.tie_word_embeddings else 0,
        last_root_elements=(tree.tail or tree.embeddings)[-1].numel,
        passes=passes,
        head=head_pass(model, compute, batch),
        kept=tuple(total_bytes(_kept_lines(one, recipe)) for one in passes),
        persistent=(),
        left_shards=0,
        left_whole=0,
        replicated=where(mesh.dp_replicate > 1, 1, 0),
        reshard=_reshard(recipe),
    )
    several = where(batch.grad_accum_steps > 1, 1, 0)
    plan = plan._replace(persistent=_persistent(plan, tree))
    if recipe.sync_every_micro_batch:
        return plan._replace(left_shards=several * _all_shards(plan))
    return plan._replace(left_whole=several)


def _group(parameters: tuple[Parameter, ...], n: Int, symbol: str) -> Group:
    shard: Int = 0
    for parameter in parameters:
        shard = shard + ceil_div(parameter.shape[0], n) * (parameter.numel // parameter.shape[0])
    return Group(shard, shard * n, sum(parameter.numel for parameter in parameters), symbol)


def _reshard(recipe: RecipeSpec) -> bool | int:
    chosen = recipe.fsdp2.reshard_after_forward
    return recipe.zero_stage == 3 if chosen is None else chosen


def _kept_lines(one: BlockPass, recipe: RecipeSpec) -> tuple[Line, ...]:
    return {"none": one.saved, "selective": one.selective, "full": one.checkpoint}[recipe.recompute]


def _local_tensors(tree: Layout, n: Int) -> Iterator[LocalTensor]:
    for parameter in tree.embeddings:
        yield LocalTensor((ceil_div(parameter.shape[0], n), *parameter.shape[1:]), in_block=False)
    for run in tree.runs:
        for parameter in run.parameters:
            yield LocalTensor((ceil_div(parameter.shape[0], n), *parameter.shape[1:]), repeat=run.layers)
    for parameter in tree.tail:
        yield LocalTensor((ceil_div(parameter.shape[0], n), *parameter.shape[1:]), in_block=False)


def _persistent(plan: _Plan, tree: Layout) -> tuple[Line, ...]:
    stored = plan.width.stored
    impl = implementation(plan.recipe.optimizer, plan.recipe.optimizer_impl)
    return (
        Line(Kind.PARAMETERS, stored * _all_shards(plan), "this rank's chunk of every parameter", f"{stored}·P/N", _SHARD),
        *state_lines(plan.recipe.optimizer, impl, tuple(_local_tensors(tree, plan.n)), stored, symbol="P/N"),
    )


def _step_temporaries(plan: _Plan) -> tuple[Line, ...]:
    impl = implementation(plan.recipe.optimizer, plan.recipe.optimizer_impl)
    tensors = tuple(_local_tensors(layout(plan.model), plan.n))
    return step_temporary_lines(plan.recipe.optimizer, impl, tensors, plan.width.stored, symbol="P/N")


def _all_shards(plan: _Plan) -> Int:
    return plan.root.shard + _over_runs(plan, _every_layer(plan))


def _over_runs(plan: _Plan, layers: tuple[int, ...]) -> Int:
    shards: Int = 0
    for count, group in zip(layers, plan.blocks, strict=True):
        shards = shards + count * group.shard
    return shards


def _gradient_shards(plan: _Plan, elements: Int, when: str) -> Line:
    return Line(Kind.GRADIENTS, plan.width.stored * elements, f"this rank's chunk of the gradients, {when}", "", _REDUCE)


def _left_behind(plan: _Plan, layers: tuple[int, ...], *, root: bool = True) -> tuple[Line, ...]:
    """What earlier micro-batches left and these layers (and the root group) have not reduced yet."""
    if plan.recipe.sync_every_micro_batch:
        return ()
    elements = plan.root.numel if root else 0
    for count, group in zip(layers, plan.blocks, strict=True):
        elements += count * group.numel
    n_bytes = plan.left_whole * plan.reduce_bytes * elements
    return (Line(Kind.UNSHARDED_GRADIENTS, n_bytes, "whole gradients accumulated by earlier micro-batches", "", _ACCUMULATE),)


def _every_layer(plan: _Plan) -> tuple[int, ...]:
    return tuple(run.layers for run in layout(plan.model).runs)


def _left_in_forward(plan: _Plan) -> tuple[Line, ...]:
    """What earlier micro-batches left, while a later one runs forward."""
    if plan.recipe.sync_every_micro_batch:
        return (_gradient_shards(plan, plan.left_shards, "of earlier micro-batches"),)
    return _left_behind(plan, _every_layer(plan))


# Forward and loss


def _unsharded(plan: _Plan, group: Group, what: str) -> Line:
    n_bytes = plan.width.compute * group.padded
    return Line(Kind.UNSHARDED_PARAMETERS, n_bytes, what, f"{plan.width.compute}·P_{group.symbol}", _COPY_OUT)


def _gathered(plan: _Plan, group: Group, what: str, source: str = _GATHER) -> Line:
    n_bytes = plan.gathers * plan.width.compute * group.padded
    return Line(Kind.GATHER, n_bytes, what, f"{plan.width.compute}·P_{group.symbol}", source)


def _root_unsharded(plan: _Plan) -> Line:
    return _unsharded(plan, plan.root, "embedding, final norm and head, unsharded from forward to the end of backward")


def _kept_before(plan: _Plan, position: Position) -> tuple[Line, ...]:
    n_bytes: Int = 0
    for count, one in zip(position.before, plan.kept, strict=True):
        n_bytes = n_bytes + count * one
    return (Line(Kind.ACTIVATIONS, n_bytes, _KEPT_REASON[plan.recipe.recompute]), *plan.head.shared)


_KEPT_REASON = {
    "none": "tensors saved by the blocks before this one",
    "selective": "outputs that selective recomputation keeps of the blocks before this one",
    "full": "inputs of the blocks before this one (checkpoints)",
}


def _still_unsharded(plan: _Plan, layers: tuple[int, ...]) -> tuple[Line, ...]:
    """What blocks keep of their gathered parameters between their forward and their backward, by ``reshard_after_forward``."""
    if plan.reshard is True:
        return ()
    elements: Int = 0
    for count, group in zip(layers, plan.blocks, strict=True):
        elements = elements + count * (group.padded if plan.reshard is False else group.padded // plan.reshard)
    reason = "blocks unsharded until their backward" if plan.reshard is False else "blocks' smaller shards until their backward"
    return (Line(Kind.UNSHARDED_PARAMETERS, plan.width.compute * elements, reason, "", _POST_FORWARD),)


def _forward(plan: _Plan) -> Iterator[Moment]:
    recomputed = plan.recipe.recompute != "none"
    for position in corners(plan.model):
        group, one = plan.blocks[position.run], plan.passes[position.run]
        below = plan.root if position.previous_run is None else plan.blocks[position.previous_run]
        common = (
            *plan.persistent,
            *_left_in_forward(plan),
            _root_unsharded(plan),
            *_kept_before(plan, position),
            *_still_unsharded(plan, position.before),
            _unsharded(plan, group, "this block's parameters, copied out for use"),
            _gathered(plan, group, "this block's all-gather buffer, parked until the next copy-out", _PARKED),
        )
        entering = Line(Kind.GATHER, plan.gathers * plan.width.compute * below.padded,
                        "the all-gather buffer before this one, freed at the end of the copy-out", "", _PARKED)  # fmt: skip
        held = () if position.layer == 0 or recomputed else plan.head.forward
        block_input = Line(Kind.ACTIVATIONS, plan.head.hidden_bytes, "input of this block")
        yield Moment(f"forward: unsharding {position.name}", Phase.FORWARD, (*common, entering, *held, block_input))
        inside = (*one.checkpoint, *one.forward_recompute) if recomputed else (*one.saved, *one.forward)
        yield Moment(f"forward of {position.name}", Phase.FORWARD, (*common, *held, *inside))


def _all_kept(plan: _Plan) -> tuple[Line, ...]:
    n_bytes: Int = 0
    for run, one in zip(layout(plan.model).runs, plan.kept, strict=True):
        n_bytes = n_bytes + run.layers * one
    reason = _KEPT_REASON[plan.recipe.recompute].replace(" before this one", "")
    return (Line(Kind.ACTIVATIONS, n_bytes, reason), *plan.head.shared)


def _loss(plan: _Plan) -> Iterator[Moment]:
    layers = _every_layer(plan)
    last = plan.blocks[-1]
    common = (
        *plan.persistent,
        *_left_in_forward(plan),
        _root_unsharded(plan),
        *_all_kept(plan),
        *_still_unsharded(plan, layers),
    )
    parked = _gathered(plan, last, "the last block's all-gather buffer, parked until the root's forward ends", _PARKED)
    yield Moment("loss, forward", Phase.LOSS, (*common, parked, *plan.head.saved, *plan.head.loss_forward))
    ahead = () if plan.reshard is False else (_gathered(plan, last, "the last block, gathered ahead of its backward"),)
    output = plan.head.output if plan.recipe.keep_logits else ()
    yield Moment("loss, backward", Phase.LOSS, (*common, *ahead, *plan.head.saved, *plan.head.loss_backward, *output))
    grads = (_root_gradients(plan, plan.tail_elements + plan.tied_head_elements),)
    yield Moment("backward of the final norm", Phase.BACKWARD, (*common, *ahead, *grads, *plan.head.norm_backward, *output))


# Backward


def _root_gradients(plan: _Plan, elements: int) -> Line:
    reason = "gradients of the root group made so far, kept until it is reduced at the very end"
    return Line(Kind.UNSHARDED_GRADIENTS, plan.width.compute * elements, reason, "", _REDUCE)


def _reduce_input(plan: _Plan, group: Group, what: str) -> Line:
    return Line(Kind.REDUCE, plan.reduce_bytes * group.padded, what, f"{plan.reduce_bytes}·P_{group.symbol}", _REDUCE)


def _gathered_below(plan: _Plan, position: Position) -> tuple[Line, ...]:
    """The all-gather of the block below, issued ahead while this one computes."""
    if position.previous_run is None or plan.reshard is False:
        return ()
    return (_gathered(plan, plan.blocks[position.previous_run], "the block below, gathered ahead of its backward"),)


def _reduced(plan: _Plan, layers: tuple[int, ...]) -> tuple[Line, ...]:
    """What the reduction of these layers' gradients has produced: shards, and with replicas what their all-reduce still holds.

    The all-reduce's own buffer stays until the end of backward where the shard is a copy of it in another dtype.
    """
    done = _over_runs(plan, layers)
    shards = _gradient_shards(plan, maximum(plan.left_shards, done), "of the blocks above")
    if plan.reduce_bytes == plan.width.stored:
        return (shards,)
    held = plan.replicated * plan.reduce_bytes * done
    return (
        shards,
        Line(Kind.REDUCE, held, "buffers of the all-reduces over replicas, held until backward ends", "", _REPLICAS),
    )


def _backward(plan: _Plan) -> Iterator[Moment]:
    for position in reversed(corners(plan.model)):
        common = _backward_common(plan, position)
        waiting = (*_waiting_reduce(plan, position), *_own_left_behind(plan, position))
        yield _before_block(plan, position, (*common, *waiting))
        for point in plan.passes[position.run].points:
            yield _inside_block(plan, position, point, (*common, *waiting))
        yield _after_block(plan, position, common)


def _backward_common(plan: _Plan, position: Position) -> tuple[Line, ...]:
    """Alive during the whole backward pass of one block, whatever happens inside it."""
    return (
        *plan.persistent,
        *_reduced(plan, position.after),
        *_left_behind(plan, position.before),
        _root_unsharded(plan),
        _root_gradients(plan, plan.tail_elements + plan.tied_head_elements),
        *_kept_before(plan, position),
        *_still_unsharded(plan, position.before),
        *(plan.head.output if plan.recipe.keep_logits else ()),
    )


def _waiting_reduce(plan: _Plan, position: Position) -> tuple[Line, ...]:
    if position.next_run is None:
        return ()
    return (_reduce_input(plan, plan.blocks[position.next_run], "reduce-scatter input of the block above"),)


def _own_left_behind(plan: _Plan, position: Position) -> tuple[Line, ...]:
    own = tuple(int(run == position.run) for run in range(len(plan.blocks)))
    return _left_behind(plan, own, root=False)


def _before_block(plan: _Plan, position: Position, alive: tuple[Line, ...]) -> Moment:
    """Its parameters are copied out of the all-gather buffer, then the all-gather of the block below is issued."""
    group, one = plan.blocks[position.run], plan.passes[position.run]
    own: Int = plan.gathers * plan.width.compute * group.padded
    if plan.reshard is False:
        buffers: tuple[Line, ...] = ()
    elif position.previous_run is None:
        buffers = (_gathered(plan, group, "this block's all-gather buffer, until it is copied out"),)
    else:
        below = plan.blocks[position.previous_run]
        cast: Int = below.shard * plan.width.compute if plan.width.mixed else 0
        ahead = maximum(own, plan.gathers * (plan.width.compute * below.padded + cast))
        buffers = (
            Line(Kind.GATHER, ahead, "this block's all-gather buffer, then the next one's and its cast input", "", _GATHER),
        )
    lines = (
        *alive,
        _unsharded(plan, group, "this block's parameters, copied out for use"),
        *buffers,
        *_kept_lines(one, plan.recipe),
        Line(Kind.ACTIVATIONS, plan.head.hidden_bytes, "gradient that flows into this block"),
    )
    return Moment(f"backward: unsharding {position.name}", Phase.BACKWARD, lines)


def _inside_block(plan: _Plan, position: Position, point: BackwardPoint, alive: tuple[Line, ...]) -> Moment:
    group = plan.blocks[position.run]
    checkpoint = () if plan.recipe.recompute == "none" else plan.passes[position.run].checkpoint_in_backward
    lines = (
        *alive,
        _unsharded(plan, group, "this block's parameters, copied out for use"),
        *_gathered_below(plan, position),
        *checkpoint,
        *point.lines,
        Line(Kind.UNSHARDED_GRADIENTS, plan.width.compute * point.gradients, "gradients of this block made so far"),
    )
    return Moment(f"backward of {position.name}: {point.name}", Phase.BACKWARD, lines)


def _after_block(plan: _Plan, position: Position, alive: tuple[Line, ...]) -> Moment:
    """Its gradients are copied into the reduce-scatter input; then the output joins the input, the gradients gone."""
    group = plan.blocks[position.run]
    checkpoint = () if plan.recipe.recompute == "none" else plan.passes[position.run].checkpoint
    lines = (
        *alive,
        *_gathered_below(plan, position),
        _reduce_input(plan, group, "reduce-scatter input of this block"),
        _copied_in_or_reduced(plan, group),
        Line(Kind.ACTIVATIONS, plan.head.hidden_bytes, "gradient that flows out of this block"),
        *checkpoint,
    )
    return Moment(f"backward: reducing {position.name}", Phase.BACKWARD, lines)


def _copied_in_or_reduced(plan: _Plan, group: Group) -> Line:
    made = where(plan.left_whole > 0, plan.reduce_bytes * group.numel, plan.width.compute * group.numel)
    reason = "gradients of this block while they are copied in, or the reduce-scatter output"
    return Line(Kind.UNSHARDED_GRADIENTS, maximum(made, _output_bytes(plan, group)), reason, "", _REDUCE)


def _output_bytes(plan: _Plan, group: Group) -> Int:
    """The reduce-scatter output and, where it is in another dtype than the parameters, its cast."""
    cast = 0 if plan.reduce_bytes == plan.width.stored else plan.width.stored
    return group.shard * (plan.reduce_bytes + cast)


def _end_of_backward(plan: _Plan) -> Iterator[Moment]:
    root, width = plan.root, plan.width.compute
    none = tuple(0 for _ in plan.blocks)
    common = (*plan.persistent, *_reduced(plan, _every_layer(plan)))
    gradients = (_root_gradients(plan, root.numel), *_left_behind(plan, none))
    tied = Line(Kind.UNSHARDED_GRADIENTS, width * plan.tied_head_elements, "the tied head's gradient beside the embedding's")
    at_embedding = (
        *common,
        *gradients,
        tied,
        _root_unsharded(plan),
        _reduce_input(plan, plan.blocks[0], "reduce-scatter input of the first block"),
        Line(Kind.ACTIVATIONS, plan.head.hidden_bytes, "gradient that flows into the embedding"),
    )
    yield Moment("backward of the embedding", Phase.BACKWARD, at_embedding)
    reduce_input = _reduce_input(plan, root, "reduce-scatter input of the root group")
    made = where(plan.left_whole > 0, plan.reduce_bytes * root.numel, width * root.numel)
    copied = Line(Kind.UNSHARDED_GRADIENTS, made, "gradients of the root group while they are copied in", "", _REDUCE)
    yield Moment("backward: reducing the root group", Phase.BACKWARD, (*common, copied, reduce_input))
    last = Line(
        Kind.UNSHARDED_GRADIENTS, width * plan.last_root_elements, "the group's last gradient, still named", "", _REDUCE
    )
    output = Line(Kind.REDUCE, _output_bytes(plan, root), "reduce-scatter output of the root group", "", _REDUCE)
    yield Moment("backward: root group reduced", Phase.BACKWARD, (*common, last, reduce_input, output))


# Traffic


def _collectives(plan: _Plan, mesh: Mesh, batch: Batch) -> tuple[Collective, ...]:
    passes = batch.grad_accum_steps
    reductions: Int = passes if plan.recipe.sync_every_micro_batch else 1
    runs = layout(plan.model).runs
    groups = [(plan.root, 1, "root group")]
    groups += [(group, run.layers, f"{run.kind} blocks") for group, run in zip(plan.blocks, runs, strict=True)]
    calls: list[Collective] = []
    for group, layers, name in groups:
        what = f"parameters of the {name}"
        calls.append(_gather_call(plan, group, passes * layers, what, "forward", ranks=plan.n))
        if plan.reshard is not False and group is not plan.root:
            again = plan.n if plan.reshard is True else plan.reshard
            calls.append(_gather_call(plan, group, passes * layers, what, "backward", ranks=again))
        calls.append(_reduce_call(plan, group, reductions * layers, f"gradients of the {name}"))
        calls.append(_replica_call(plan, group, reductions * layers, f"gradient shards of the {name}", mesh))
    return tuple(calls)


def _gather_call(plan: _Plan, group: Group, calls: Int, what: str, when: str, *, ranks: Int) -> Collective:
    payload = plan.width.compute * group.padded
    sent = calls * (payload // ranks) * (ranks - 1)
    return Collective(
        "all_gather", what, when, ranks, calls, payload, sent, where(plan.n > 1, calls * group.padded, 0), _GATHER
    )


def _reduce_call(plan: _Plan, group: Group, calls: Int, what: str) -> Collective:
    payload = plan.reduce_bytes * group.padded
    sent = calls * plan.reduce_bytes * group.shard * (plan.n - 1)
    elements = where(plan.n > 1, calls * group.padded, 0)
    return Collective("reduce_scatter", what, "backward", plan.n, calls, payload, sent, elements, _REDUCE)


def _replica_call(plan: _Plan, group: Group, calls: Int, what: str, mesh: Mesh) -> Collective:
    replicas = mesh.dp_replicate
    payload: Int = plan.reduce_bytes * group.shard
    passes: Int = 2 * calls
    sent: Int = passes * ceil_div(payload, replicas) * (replicas - 1)
    elements = where(replicas > 1, calls * 2 * group.shard, 0)
    return Collective("all_reduce", what, "backward", replicas, calls, payload, sent, elements, _REDUCE)


def _symbols(plan: _Plan) -> tuple[Symbol, ...]:
    total = plan.n * _all_shards(plan)
    return (
        Symbol("N", plan.n, "ranks that share one copy"),
        Symbol("P", total, "parameters with each one's dim 0 padded to a multiple of N"),
        Symbol("P_root", plan.root.padded, "of them in the root group (embedding, final norm, head)"),
        *(Symbol(f"P_{group.symbol}", group.padded, f"of them in one {group.symbol} block") for group in plan.blocks),
    )
