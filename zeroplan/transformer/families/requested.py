"""The memory requests and releases of a block, or of the modules after the blocks, in order, forward and backward.

The programs behind a block's moments (``traced.py``, ``ending.py``) run once per structure, and their tapes record the
requests. Sizes have values for every batch. The engine that runs the block handles its input, its output and its weights'
gradients.
"""

from collections import Counter
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple, TypeAlias

from zeroplan.expr import Size, Values
from zeroplan.ledger import Kind, OffGpu, Role
from zeroplan.numeric import Int
from zeroplan.spec.batch import Batch
from zeroplan.spec.model import ModelSpec
from zeroplan.spec.recipe import Loss, Recompute
from zeroplan.transformer.blocks import Compute
from zeroplan.transformer.families.definition import Block
from zeroplan.transformer.families.ending import Ending, ending_of, ran_to_the_loss
from zeroplan.transformer.families.sharded import SHARES
from zeroplan.transformer.families.split_backward import ran_program, structure_and_order
from zeroplan.transformer.families.tape import Action, Do, Exchange, Owner, Store, Tape, Value
from zeroplan.transformer.families.traced import incoming_of, run_forward, structure_of, torchtitan_structure
from zeroplan.transformer.families.widths import in_one_chunk, is_masked, values_of, widths
from zeroplan.transformer.parameters import WITH_STATES, BlockRun, plain_kind

Thing: TypeAlias = Store | Size | Owner | Exchange | None
"""What an action acts on: a tensor, the elements of a weight, a module, a collective, or nothing."""
Actions: TypeAlias = tuple[Action, ...]


class Requested(NamedTuple):
    """A program's actions."""

    forward: Actions
    backward: Actions
    given: Store
    """The program's input. The engine requests it, and ends its variable."""
    made: Store
    """The program's output. The engine ends its variable."""
    incoming: Store
    """The gradient of the output, which the engine makes."""
    outgoing: Store | None
    """The gradient of the input, which the engine frees."""
    saves_given: bool
    """The program saves its input and frees it in its backward."""


class Instruction(NamedTuple):
    """One action for one batch."""

    do: Do
    thing: Thing
    size: int = 0
    """Bytes of a tensor or of a collective's largest buffer, elements of a weight."""
    pieces: int = 1
    """The number of tensors of that size."""
    kind: Kind = Kind.UNSHARDED_GRADIENTS
    reason: str = "gradient of a weight"
    multiplies: bool = False
    """A matrix product makes it: a linear layer's output, or the gradient of its input."""
    sends: Exchange | None = None
    """The collective."""
    is_scratch: bool = False
    """Memory inside a CUDA kernel, which a run on fake tensors does not record."""


Program: TypeAlias = tuple[Instruction, ...]


class Stretch(NamedTuple):
    """Requests and releases that a program makes without its engine, up to an instruction that needs it.

    Requests are numbered from the beginning of the program; in a backward, those of its forward's ``saved`` tensors come first.
    """

    made: tuple[tuple[int, Kind, str, bool], ...]
    """Bytes, kind, reason, and whether it is scratch."""
    deeds: tuple[int, ...]
    """In order: the number of a request, or ``-1 - number`` of a released one."""
    kept: tuple[tuple[Thing, int], ...]
    """Tensors that something else releases, and the numbers of their requests."""
    then: Instruction | None


class Sized(NamedTuple):
    """A program's actions for one batch, with the tensors it shares with its neighbours."""

    forward: Program
    backward: Program
    requested: Requested
    stretches: tuple[tuple[Stretch, ...], tuple[Stretch, ...]]
    """Both again, in stretches."""
    saved: tuple[Thing, ...]
    """The tensors that the forward requests and only the backward releases."""


def block_requests(
    model: ModelSpec, kind: str, compute: Compute, batch: Batch, recompute: Recompute, *, marking: bool = False,
    received: bool = False,
) -> Sized:  # fmt: skip
    """Return the actions of a block of this kind, with this recomputation.

    ``marking``: they contain where modules begin and end. ``received``: the gradient of its output lies in a buffer, so that
    autograd adds nothing to it in place.
    """
    model = model.of_kind(kind)
    x = widths(model, compute, batch)
    alike = plain_kind(model, kind)
    masked = _one(in_one_chunk(model, x) if alike in WITH_STATES else is_masked(model, x, alike))
    single = alike in WITH_STATES and masked and bool(model.layer_pattern) and _one(x.micro_batch == 1)
    structure = structure_of(model, kind, compute, x, masked=masked, single=single)
    made = _of_a_block(structure, recompute, offloaded=compute.offloaded, marking=marking, received=received)
    return _sized(made, values_of(model, x, compute.tp if structure.sharded else 1))


class SplitRequests(NamedTuple):
    """A program with a backward in two halves: the forward and input gradients, then weight gradients."""

    first: Sized
    second: Sized
    """Its forward is empty."""


def split_block_requests(model: ModelSpec, run: BlockRun, compute: Compute, batch: Batch) -> SplitRequests:
    """Return the actions of a block whose backward is split."""
    structure, order = structure_and_order(model, run, compute, batch)
    return _split_requests(
        structure, order, values_of(model, widths(model, compute, batch), compute.tp if structure.sharded else 1)
    )


def split_ending_requests(model: ModelSpec, compute: Compute, batch: Batch) -> SplitRequests:
    """Return the actions of final norm, head and loss with a split backward."""
    x = widths(model, compute, batch)
    return _split_requests(ending_of(model, compute, x, "full"), (0, 1), values_of(model, x, compute.tp))


def _split_requests(structure: Block | Ending, order: tuple[int, ...], values: Values) -> SplitRequests:
    return SplitRequests(*(_sized(made, values) for made in _split_actions(structure, order)))


def ending_requests(model: ModelSpec, compute: Compute, batch: Batch, loss: Loss, *, marking: bool = False) -> Sized:
    """Return the actions of final norm, head and loss. Context-parallel ranks get shifted labels."""
    x = widths(model, compute, batch)
    made = _of_an_ending(ending_of(model, compute, x, loss), marking=marking)
    values = {**values_of(model, x, compute.tp), "i": compute.prompt_len}
    return _sized(made if compute.cp == 1 else _without_labels(made), values)


@lru_cache(maxsize=64)
def _without_labels(whole: Requested) -> Requested:
    def without(actions: Actions) -> Actions:
        return tuple([(do, one) for do, one in actions if not (isinstance(one, Store) and one.tag.role is Role.LABELS)])

    return whole._replace(forward=without(whole.forward), backward=without(whole.backward))


def torchtitan_requests(model: ModelSpec, compute: Compute, batch: Batch, recompute: Recompute) -> tuple[Sized, Sized]:
    """Return the actions of a block of torchtitan's Llama 3, and of the modules after the blocks."""
    x = widths(model, compute, batch)
    values = values_of(model, x)
    return (
        _sized(_of_a_block(torchtitan_structure(x, compute.fused), recompute, offloaded=False), values),
        _sized(_of_torchtitans_ending(wide=x.element == 4), values),
    )


def _one(answer: object) -> bool:
    assert isinstance(answer, bool)  # noqa: S101  of one batch
    return answer


def _sized(requested: Requested, values: Values) -> Sized:
    things = dict.fromkeys([one for _, one in (*requested.forward, *requested.backward)])
    sizes = {one: _size(one, values) for one in things}
    forward, backward = (
        tuple([_instruction(do, one, sizes[one]) for do, one in actions]) for actions in (requested.forward, requested.backward)
    )
    return Sized(forward, backward, requested, *_in_stretches(forward, backward, requested))


def _in_stretches(
    forward: Program, backward: Program, requested: Requested
) -> tuple[tuple[tuple[Stretch, ...], tuple[Stretch, ...]], tuple[Thing, ...]]:
    made = [{one.thing for one in each if one.do is Do.REQUEST} for each in (forward, backward)]
    shared = (made[0] & made[1]).union(requested[2:6])
    first, released = _cut(forward, made[0] - shared, {}), {one.thing for one in backward if one.do is Do.RELEASE} - shared
    saved = Counter([thing for one in first for thing, _ in one.kept if thing in released])
    ends = zip(saved.items(), accumulate(saved.values()), strict=True)
    numbers = {thing: range(end - count, end) for (thing, count), end in ends}
    return (first, _cut(backward, (made[1] - shared) | saved.keys(), numbers)), tuple(saved)


def _cut(program: Program, own: set[Thing], numbers: dict[Thing, range]) -> tuple[Stretch, ...]:
    """Cut a program into stretches. ``own``: tensors that it alone releases; ``numbers`` of those that it begins with."""
    alive = set[Thing]()
    for each in program:
        (alive.add if each.do is Do.REQUEST else alive.discard)(each.thing)
    own, count, found = own - alive, sum(map(len, numbers.values())), list[Stretch]()
    made, deeds, kept = list[tuple[int, Kind, str, bool]](), list[int](), list[tuple[Thing, int]]()
    every: tuple[Instruction | None, ...] = (*program, None)
    for one in every:
        if one is not None and one.do is Do.REQUEST:
            new = range(count, count + (one.pieces if one.size else 0))
            made += [(one.size, one.kind, one.reason, one.is_scratch)] * len(new)
            deeds += new
            count += len(new)
            if one.thing in own:
                numbers[one.thing] = new
            else:
                kept += [(one.thing, number) for number in new]
        elif one is not None and one.do is Do.RELEASE and one.thing in own:
            deeds += [-1 - number for number in numbers.pop(one.thing, ())]
        else:
            found.append(Stretch(tuple(made), tuple(deeds), tuple(kept), one))
            made, deeds, kept = [], [], []
    return tuple(found)


def _size(thing: Thing, values: Values) -> int:
    if thing is None or isinstance(thing, Owner):
        return 0
    return _int((thing if isinstance(thing, Size) else thing.size).value(values))


def _instruction(do: Do, thing: Thing, size: int) -> Instruction:
    if not isinstance(thing, Store):
        return Instruction(do, thing, size, sends=thing if isinstance(thing, Exchange) else None)
    multiplies = thing.tag.role is Role.OUTPUT or thing.kind is Kind.ACTIVATION_GRADIENTS
    is_scratch = thing.tag.off_gpu is OffGpu.NO_TENSOR
    return Instruction(
        do, thing, size // thing.pieces, thing.pieces, thing.kind, thing.reason, multiplies, is_scratch=is_scratch
    )


def _int(value: Int) -> int:
    assert isinstance(value, int)  # noqa: S101  of one batch
    return value


@lru_cache(maxsize=256)
def _of_a_block(
    structure: Block, recompute: Recompute, *, offloaded: bool, marking: bool = False, received: bool = False
) -> Requested:
    if recompute == "none":
        made = _plain(structure, marking=marking, received=received)
    else:
        keeps = recompute == "selective"
        made = _recomputed(structure, keeps=keeps, offloaded=offloaded, marking=marking, received=received)
    return _of_a_rank(made) if structure.sharded else made


def _of_a_rank(whole: Requested) -> Requested:
    """Return the actions of one tensor-parallel rank: its share of every split width."""
    acted = [one for _, one in (*whole.forward, *whole.backward)]
    for one in dict.fromkeys((*acted, whole.given, whole.made, whole.incoming, whole.outgoing)):
        if isinstance(one, Store):
            one.size = one.size.replacing(SHARES)

    def shared(actions: Actions) -> Actions:
        return tuple([(do, _of_this_rank(one)) for do, one in actions])

    return whole._replace(forward=shared(whole.forward), backward=shared(whole.backward))


def _of_this_rank(one: Thing) -> Thing:
    if isinstance(one, Exchange):
        return one._replace(size=one.size.replacing(SHARES))
    return one.replacing(SHARES) if isinstance(one, Size) else one


def _plain(structure: Block, *, marking: bool, received: bool) -> Requested:
    tape, given, made = run_forward(structure, saving=True, marking=marking)
    forward, incoming = _without(tape.history.actions, given.store), _incoming(made, structure, received=received)
    tape.release(made, given)
    tape.drop(*tape.history.input_copies)
    saves_given, before = given.store in tape.alive, len(tape.history.actions)
    tape.run_backward(made, incoming)
    backward, outgoing = tuple(tape.history.actions[before:]), tape.history.outgoing
    return Requested(tuple(forward), backward, given.store, made.store, incoming, outgoing, saves_given)


def _without(actions: list[Action], *stores: Store) -> list[Action]:
    """Return the actions without the requests of these tensors."""
    return [(do, thing) for do, thing in actions if do is not Do.REQUEST or thing not in stores]


def _incoming(output: Value, structure: Block, *, received: bool) -> Store:
    """Return the gradient of a block's output. ``received``: a buffer of the engine holds it, too."""
    store = incoming_of(output, structure)
    store.holds += received
    return store


def _recomputed(structure: Block, *, keeps: bool, offloaded: bool, marking: bool, received: bool) -> Requested:
    """Run a checkpoint. The forward keeps its input and, if selective, some outputs; the backward recomputes the rest.

    An offloaded input returns to the GPU for the recomputation and is freed after it, unless the block saves it.
    """
    tape, given, made = run_forward(structure, saving=False, keeps_selected=keeps, marking=marking)
    forward, kept = _without(tape.history.actions, given.store), tape.selected.stores() if keeps else ()
    again, _, output = run_forward(structure, saving=True, given=given.store, recomputed=True, marking=marking)
    again.end_nodes()
    copies, in_nodes = tape.history.input_copies, tape.history.in_nodes
    stays = (given.store, made.store, *kept, *copies, *in_nodes)
    forward += [(Do.RELEASE, store) for store in tape.alive if store not in stays]  # BLOOM's block has that of another
    of_rerun = (*(again.selected.stores() if keeps else ()), *again.history.input_copies)
    same = dict(zip(of_rerun, (*kept, *copies), strict=True))  # tensors of the recomputation that are tensors of the forward
    to_the_end = keeps or structure.family == "torchtitan"  # whose checkpoints have early_stop=False
    incoming, until_saved = _incoming(output, structure, received=received), [] if to_the_end else _until_last_saved(again)
    again.release(given, output)
    ran, is_saved = len(again.history.actions), given.store in again.saved
    rerun = [one for one in again.history.actions[:ran] if not (keeps and _is_kept(one))] if to_the_end else until_saved
    again.run_backward(output, incoming)
    needed = max(ran, again.history.rerun_at)
    before, after = again.history.actions[ran:needed], again.history.actions[needed:]
    released = set() if to_the_end else {thing for do, thing in rerun if do is Do.RELEASE}
    if offloaded:
        rerun = [(Do.REQUEST, given.store), *rerun, *(() if to_the_end or is_saved else ((Do.RELEASE, given.store),))]
    else:
        released.add(given.store)  # the checkpoint holds it until the block is done
        rerun = [(do, thing) for do, thing in rerun if do is not Do.RELEASE or thing is not given.store]
    back = [(do, thing) for do, thing in (*before, *after) if do is not Do.RELEASE or thing not in released]
    back[len(before) : len(before)] = _without(rerun, *same)
    back = [(do, thing) for do, thing in back if thing not in again.history.input_copies]  # the checkpoint's own, too
    back += [(Do.RELEASE, store) for store in (*copies, *in_nodes)]
    backward = tuple([(do, same.get(thing, thing) if isinstance(thing, Store) else thing) for do, thing in back])
    return Requested(tuple(forward), backward, given.store, made.store, incoming, again.history.outgoing, saves_given=True)


def _is_kept(action: Action) -> bool:
    """Whether it is a collective whose result a selective checkpoint keeps."""
    return isinstance(action[1], Exchange) and action[1].kept


def _until_last_saved(tape: Tape) -> list[Action]:
    """Return the actions of a recomputation, which stops at the last operator that saves, and frees unsaved tensors."""
    actions = _without(tape.history.actions[: tape.history.saved_at], *tape.history.outputs_of_saver)
    there: dict[Store, None] = {}
    for do, thing in actions:
        if isinstance(thing, Store) and do is Do.REQUEST:
            there[thing] = None
        elif isinstance(thing, Store) and do is Do.RELEASE:
            there.pop(thing, None)
    return [*actions, *((Do.RELEASE, store) for store in there if store not in tape.saved)]


@lru_cache(maxsize=64)
def _of_an_ending(ending: Ending, *, marking: bool) -> Requested:
    made = _to_the_loss(*ran_to_the_loss(ending, marking=marking))
    return _of_a_rank(made) if ending.sharded else made


@lru_cache(maxsize=256)
def _split_actions(structure: Block | Ending, order: tuple[int, ...]) -> tuple[Requested, Requested]:
    """Return a backward to the input, and one through the weights in this order, which releases each weight's tensors."""
    tape, given, output, incoming = ran_program(structure)
    forward = _without(tape.history.actions, given)
    if isinstance(structure, Block):
        tape.drop(output.store, given)
    saves_given, ran = given in tape.alive, len(tape.history.actions)
    tape.run_to_inputs(output, incoming)
    first, left = tape.history.actions[ran:], tape.deferred[::-1]
    ran = len(tape.history.actions)
    for at in order:
        tape.run_weights(left[at])
        tape.history.actions.append((Do.ARRIVE, None))
    outgoing, second = tape.history.outgoing, tuple(tape.history.actions[ran:])
    made = Requested(tuple(forward), tuple(first), given, output.store, incoming, outgoing, saves_given)
    both = made, made._replace(forward=(), backward=second)
    return (_of_a_rank(both[0]), _of_a_rank(both[1])) if structure.sharded else both


@lru_cache(maxsize=2)
def _of_torchtitans_ending(*, wide: bool) -> Requested:
    from zeroplan.transformer.families.torchtitan import ending  # noqa: PLC0415  keeps start-up fast

    tape = Tape(wide=wide, autocast=False, saving=True)
    return _to_the_loss(tape, ending(tape))


def _to_the_loss(tape: Tape, loss: Value) -> Requested:
    """Return the actions of a tape that has run forward to the loss, and of its backward."""
    (_, given), *forward = tape.history.actions
    assert isinstance(given, Store)  # noqa: S101  the input is requested first
    then = len(tape.history.actions)
    tape.run_backward(loss, loss.store)
    backward, outgoing = tuple(tape.history.actions[then:]), tape.history.outgoing
    return Requested(tuple(forward), backward, given, loss.store, loss.store, outgoing, saves_given=False)
