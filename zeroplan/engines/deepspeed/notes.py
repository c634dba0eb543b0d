"""The gathered elements over a pass under ZeRO-3: the notes that a coordinator's pass leaves, and their summary."""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from copy import copy
from functools import lru_cache
from typing import NamedTuple

from zeroplan.engines.collecting import Highest
from zeroplan.engines.deepspeed.coordinator import SECOND, Coordinator, Pass, Sent, saved_key
from zeroplan.engines.deepspeed.order import BACKWARD, FORWARD, Step
from zeroplan.engines.deepspeed.strides import Strider, parts_of
from zeroplan.engines.rows import Row, Sizes, embedding_elements, has_tied_head
from zeroplan.ledger import Kind
from zeroplan.numeric import ceil_div

#: Key of the notes on a block's recomputation as a whole; before a module's name, on the gather of this module in it.
RECOMPUTED = "recomputed"


class Note(NamedTuple):
    """Gathered elements around one module's backward."""

    made: int
    """Elements of the block's gradients made by its end."""
    gathering: int
    """The most while its parameters are gathered."""
    during: int
    after: int
    handing: int
    """When its gradients arrive, after autograd has freed its operators' saved tensors."""


Noted = tuple[Step, Note]


class Gathered:
    """Gathered elements over one pass, including copies: the notes of its steps. One object per model and options."""

    def __init__(self, whole: Row) -> None:
        self.whole, n_blocks = whole, whole.n_blocks
        self.forward = [0] * n_blocks
        """The most during each block's forward; with experts, without the extra memory of their gather."""
        self.before_experts = [0] * n_blocks
        """The most in each block until its experts are gathered and have made nothing; 0 without experts."""
        self.head_gathering = 0
        """The most while the parameters of final norm and head are gathered, before either has made anything."""
        self.head_forward = self.norm_forward = 0
        """Gathered while the head runs forward, and while the final norm does."""
        self.loss = 0
        self.head: tuple[int, ...] = ()
        """In the backward: the most while the parameters of loss, head and final norm are gathered."""
        self.head_runs: tuple[int, ...] = ()
        """In the backward: held while loss, head and final norm run."""
        self.past_head = 0
        """Held when the last gradient after the blocks is made, if more than a head and a norm follow the blocks."""
        self.backward: tuple[tuple[Note, ...], ...] = ()
        """Notes of each block, in the order of its gradients. Blocks with equal notes share them."""
        self.again: tuple[tuple[tuple[str, int], ...], ...] = ()
        """For each block, the most while each module of its recomputation is gathered, by the module's name; "" before them."""
        self.modules: tuple[tuple[tuple[str, Note], ...], ...] = ()
        """Notes of each block with frozen weights, by module name; and of its recomputation."""
        self.head_notes: tuple[Note, ...] = ()
        """Notes of the modules after the blocks, in the order of their gradients; for a profile."""
        self.first = 0
        """The most in the forward before the first block."""
        self.below = list[Note]()
        """Notes of the backward of each module before the first block."""
        self.embedding = 0
        """The most while the embedding is gathered for its backward, after those of ``below`` that come first."""
        self.end = 0
        """The most from the gather of the embedding for its backward on."""
        self.sent_forward, self.sent_backward = Sent(), Sent()
        self.persistent_sent: Sizes = ()
        """The parameters that stay gathered between steps."""
        self.most_read, self.read_twice = 0, False
        """The most parameters from NVMe whose buffers are in use at the same time; whether one is read ahead twice."""
        self.tied_head = 0
        """Elements of a gradient that waits for the embedding's; for a profile."""

    @property
    def persistent(self) -> int:
        """Elements of the parameters that stay gathered between steps."""
        return sum(numel * count for numel, count in self.persistent_sent)

    @property
    def n_persistent(self) -> int:
        """The number of these parameters."""
        return sum(count for _, count in self.persistent_sent)

    def is_like(self, other: "Gathered") -> bool:
        """Whether every note is equal. ``==`` compares identity, which keeps look-ups fast."""
        return vars(self) == vars(other)

    def in_forward(self, step: Step, gathering: int, during: int) -> None:
        """Note the most while a module's parameters are gathered, and the elements held while it runs."""
        if step.block == len(self.forward):
            self.head_gathering = max(self.head_gathering, gathering)
            self.norm_forward, self.head_forward = self.head_forward, during
        elif step.block >= 0:
            if step.has_experts:
                self.before_experts[step.block], gathering = max(self.forward[step.block], gathering), during
            self.forward[step.block] = max(self.forward[step.block], gathering)
        else:
            self.first = max(self.first, gathering)

    def in_backward(self, steps: Sequence[Noted]) -> None:
        """Take the notes of all steps of the backward."""
        blocks: list[list[Noted]] = [[] for _ in self.forward]
        after_blocks = list[Noted]()
        for step, note in steps:
            if step.block >= 0:
                (after_blocks if step.block == len(blocks) else blocks[step.block]).append((step, note))
            else:
                self.below += [note] if step.parameters else []
                is_next = step.parameters or not self.below
                self.embedding = note.gathering if is_next else max(self.embedding, note.gathering)
        self._after_blocks(after_blocks)
        numbers: dict[Hashable, int] = {}
        which = [numbers.setdefault(_decisive(block), len(numbers)) for block in blocks]
        alike = dict(zip(which, blocks, strict=True))
        again = [*map(_gathered_again, alike.values())]
        self.again = tuple([again[number] for number in which])
        if all(self.whole.trained):
            known: dict[tuple[Note, ...], tuple[Note, ...]] = {}
            merged = [known.setdefault(notes, notes) for notes in map(per_gradient, alike.values())]
            self.backward = tuple([merged[number] for number in which])
        else:
            making = ([(step, note) for step, note in block if not self._idle(step)] for block in blocks)
            self.backward, self.modules = tuple(map(per_gradient, making)), tuple(map(per_module, blocks))

    def _after_blocks(self, notes: list[Noted]) -> None:
        self.head = _at_head([note.gathering for _, note in notes])
        self.head_runs = _at_head([note.during for _, note in notes])
        self.past_head = notes[-1][1].during if len(notes) > 2 else 0
        if self.whole.model.profile is not None:
            self.head_notes = per_gradient(notes)
            self.tied_head = embedding_elements(self.whole) if has_tied_head(self.whole) else 0

    def _idle(self, step: Step) -> bool:
        """Whether a module has parameters and makes no gradients."""
        return bool(step.parameters) and not any(self.whole.trained[index] for index in step.parameters)


def _decisive(notes: list[Noted]) -> Hashable:
    """Return all that decides a block's merged notes. Most blocks have the same."""
    modules = tuple([(step.name, step.direction, not step.parameters) for step, _ in notes])
    return modules, tuple([note for _, note in notes])


def _gathered_again(notes: list[Noted]) -> tuple[tuple[str, int], ...]:
    """Return the most while each module of a block's recomputation is gathered; first what is gathered before it."""
    before, again = 0, list[tuple[str, int]]()
    for step, note in notes:
        if note.made:
            break
        if step.direction == FORWARD:
            again.append((step.name, note.gathering))
        elif not again:
            before = max(before, note.gathering)
    return (("", before), *again)


def _at_head(counts: list[int]) -> tuple[int, int, int]:
    """Return the counts at the loss, the head and the final norm, of the modules after the blocks."""
    return max(counts[:-3], default=0), counts[-min(3, len(counts))], max(counts[-2:])


def per_gradient(notes: Iterable[Noted]) -> tuple[Note, ...]:
    """Merge notes by number of gradients made. A module without parameters counts after the one before it."""
    merged: dict[int, Note] = {}
    for step, note in notes:
        before = merged.get(note.made, note)
        if step.parameters or not note.made:
            most = max(note.gathering, before.gathering), max(note.during, before.during), note.after
            merged[note.made] = Note(note.made, *most, max(note.handing, before.handing))
        else:
            merged[note.made] = before._replace(after=note.after)
    return tuple(merged[made] for made in sorted(merged))


def per_module(notes: Iterable[Noted]) -> tuple[tuple[str, Note], ...]:
    """Name notes after modules. A recomputation's note has the most so far; its last module also has its own note."""
    named: dict[str, Note] = {}
    for step, note in notes:
        if step.direction == BACKWARD:
            named[step.name] = note
            continue
        most = max(note.gathering, named[RECOMPUTED].gathering if RECOMPUTED in named else 0)
        named[RECOMPUTED] = named[f"{RECOMPUTED}: {step.name}"] = note._replace(gathering=most)
    return tuple(named.items())


def rising(blocks: Sequence[int], held: Callable[[int], int]) -> tuple[tuple[int, int], ...]:
    """Return the last of these blocks, and earlier ones with more gathered than all later ones, each with its elements.

    >>> rising((1, 2, 3), lambda block: {1: 7, 2: 4, 3: 5}[block])
    ((3, 5), (1, 7))
    """
    chosen: list[tuple[int, int]] = []
    for block in reversed(blocks):
        elements = held(block)
        if not chosen or elements > chosen[-1][1]:
            chosen.append((block, elements))
    return tuple(chosen)


@lru_cache(maxsize=64)
def gathered(one: Pass) -> Gathered:
    """Return the gathered elements in one pass of the model, with one micro-batch per step.

    A first pass also gathers persistent parameters. It raises SpecError if DeepSpeed cannot quantize a module's shards.
    """
    if one.sharing.width:
        _Replay(one, recording=True, resident=False).decide()
    return _replayed(one)[0] if one.trains else _with_forward_alone(one)


@lru_cache(maxsize=64)
def _replayed(one: Pass) -> tuple[Gathered, set[tuple[int, int]]]:
    """Return the gathered elements of a pass that decides the releases, and these. Do not modify them."""
    replay = _Replay(one)
    return replay.run(), replay.decided


def _with_forward_alone(one: Pass) -> Gathered:
    """Return the gathered elements of a model that runs forwards only: the coordinator's trace ends with the head."""
    training = one._replace(trains=True)
    found, alone = copy(gathered(training)), _Replay(training, last_forward=True).run()
    for name in ("forward", "before_experts", "head_gathering", "head_forward", "norm_forward"):
        setattr(found, name, getattr(alone, name))
    found.loss = alone.head_forward
    return found


@lru_cache(maxsize=64)
def gathered_by_several(one: Pass) -> Gathered | None:
    """Return the same with several micro-batches per step; None if nothing differs.

    The coordinator decides once, in the first pass with a complete trace, which parameters to release where
    (``__params_to_release`` is cached). With several micro-batches that pass is the second of the first step, before the step
    has gathered the persistent parameters.
    """
    first = _Replay(one, resident=False)
    first.decide()
    if one.trains and one.options.zero_hpz_partition_size == 1 and first.decided == _replayed(one)[1]:
        return None
    several = _Replay(one, decided=first.decided, later=True).run()
    return None if several.is_like(gathered(one)) else several


@lru_cache(maxsize=64)
def gathered_at_first(one: Pass) -> Gathered:
    """Return the same in the first pass of all, in which DeepSpeed records its trace.

    It releases each parameter as soon as its module ends, and prefetches nothing. But gathered weights that the graph saves stay
    until their backward, which gathers them once more.
    """
    return _Replay(one, recording=True, resident=False).run()


@lru_cache(maxsize=64)
def gathered_at_second(one: Pass) -> Gathered:
    """Return the same in the second pass of a first step with several micro-batches.

    The coordinator has its trace, but the first pass has released the persistent parameters. So this pass gathers them, often
    flat together with large ones.
    """
    return _Replay(one, resident=False, later=True).run()


@lru_cache(maxsize=64)
def most_noted(passed: Gathered) -> int:
    """Return the most elements that a pass notes."""
    return max(count for name in _COUNTED for count, _ in _pairs(getattr(passed, name), getattr(passed, name)))


@lru_cache(maxsize=64)
def more_than(early: Gathered, later: Gathered, *, of_blocks_in_forward: bool = False) -> int:
    """Return how many more elements are gathered in an early pass than at the same place of a later one; the most, at least 0.

    ``of_blocks_in_forward``: only in the forwards of blocks. Later passes also hold the persistent parameters, which their notes
    leave out.
    """
    names = ("forward", "before_experts") if of_blocks_in_forward else _COUNTED
    more = (here - there for name in names for here, there in _pairs(getattr(early, name), getattr(later, name)))
    return max(0, max(more) - later.persistent)


_COUNTED = (
    "first", "forward", "before_experts", "norm_forward", "head_gathering", "head_forward", "loss", "head",
    "head_runs", "past_head", "head_notes", "again", "backward", "modules", "below", "embedding", "end",
)  # fmt: skip
"""The attributes of :class:`Gathered` that count gathered elements."""


def _pairs(first: object, later: object) -> Iterator[tuple[int, int]]:
    """Yield the counts of two passes of the same model, place by place; of places that share their notes, those of one."""
    if isinstance(first, int) and isinstance(later, int):
        yield first, later
    elif isinstance(first, Note) and isinstance(later, Note):
        yield from zip(first[1:], later[1:], strict=True)  # without the gradients made
    elif isinstance(first, (list, tuple)) and isinstance(later, (list, tuple)):
        places = {(id(here), id(there)): (here, there) for here, there in zip(first, later, strict=True)}
        for here, there in places.values():
            yield from _pairs(here, there)


@lru_cache(maxsize=64)
def most_at_first(one: Pass) -> int | None:
    """Return a bound of the elements gathered in the first pass, without running it; None if weights are gathered in 8 bits.

    Alive are the parameters of the module that runs, with a flat gather and copies of shards, and what outlives its module: tensors
    that the graph holds, and parameters of modules whose end comes later or is seen by no hook. A block's backward frees what
    its recomputation saved. Second partitions (hpZ) stay.
    """
    if one.sharing.width:
        return None
    replay = _Replay(one, recording=True, resident=False)
    own, forward, blocks, numel = 0, 0, Counter[int](), replay.numel
    for step in replay.steps:
        ended = {index for freed in step.frees for index in freed.parameters if index not in freed.saved}
        outlive = sum([numel[index] for index in {*step.parameters, *step.in_graph} if index not in ended])
        copies = (2 if len(step.parameters) > 1 else 1) + one.sharing.copied
        own = max(own, copies * sum([numel[index] for index in step.parameters]))
        if step.direction == BACKWARD or blocks:
            blocks[step.block] += outlive
        else:
            forward += outlive
    return own + forward + blocks.pop(0, 0) + blocks.pop(-1, 0) + max(blocks.values(), default=0) + sum(replay.second.values())


class _Replay(Coordinator):
    """A pass of the coordinator that counts elements. Without quantization an element counts as one byte."""

    memory: Highest

    def __init__(
        self, one: Pass, *, recording: bool = False, resident: bool = True, decided: set[tuple[int, int]] | None = None,
        later: bool = False, last_forward: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(
            one, Highest(), element=one.sharing.width or 1, recording=recording, resident=resident, decided=decided,
            later=later, last_forward=last_forward,
        )  # fmt: skip
        self.whole, ways, self.recomputed = one.whole, one.options.zero_hpz_partition_size, one.recomputed
        self.repeats = not (one.on_nvme or one.sharing.width)
        """Whether its state can repeat from block to block."""
        for index, numel in enumerate(self.numel if later and ways > 1 else ()):  # the first micro-batch has left them
            n_bytes = 0 if index in self.resident else self.element * ceil_div(numel, ways)
            self.memory.request(SECOND, n_bytes, Kind.GATHER, "second partition of a parameter")

    @property
    def elements(self) -> int:
        """The gathered elements."""
        return self.memory.n_bytes // self.element

    def decide(self) -> None:
        """Run all steps and record only where parameters are released."""
        strider, at = self._strider(), 0
        while at < len(self.steps):
            times, _ = strider.skip(at)
            at += times * strider.n_steps(at) if times else 0
            self.begin(at)
            self.release(at, self.steps[at])
            at += 1

    def _strider(self) -> Strider:
        return Strider(self, self.memory, parts_of(self.whole, self.steps, self.recomputed) if self.repeats else ())

    def release(self, at: int, step: Step) -> None:
        """End the modules whose end a hook sees before the next module starts."""
        for freed in step.frees:
            self.free(at, freed)

    def run(self) -> Gathered:
        """Run all steps and return the gathered elements."""
        found, backward, since = Gathered(self.whole), list[Noted](), 0
        for step, (gathering, during, saved, releasing, after) in zip(self.steps, self._seen(), strict=True):
            if step.direction == BACKWARD or backward:
                most = max(gathering, since) if backward else gathering
                backward.append((step, Note(step.made, most, during, after, during - saved)))
            else:
                found.in_forward(step, max(gathering, since), max(during, releasing))
                found.loss = after
            since = releasing
        if backward:
            found.in_backward(backward)
        else:
            found.loss = 0
        found.end, found.most_read, found.read_twice = self.elements, self.most_read, self.read_twice
        found.sent_forward, found.sent_backward = self.sent[FORWARD], self.sent[BACKWARD]
        found.persistent_sent = tuple(sorted(Counter(self.numel[index] for index in self.persistent).items()))
        return found

    def _seen(self) -> list[tuple[int, int, int, int, int]]:
        """Return for every step the gathered elements.

        They are the most while it gathers, those while it runs and saved of its own, the most while its release makes second
        partitions (hpZ), which it does before it frees a parameter, and those that are left.
        """
        memory, element, seen = self.memory, self.element, list[tuple[int, int, int, int, int]]()
        strider = self._strider()
        while len(seen) < len(self.steps):
            times, more = strider.skip(len(seen))
            if times > 0:
                part, more = seen[-strider.n_steps(len(seen)) :], more // element
                seen += [
                    (g + n * more, d + n * more, s, r + n * more if r else 0, a + n * more)
                    for n in range(1, times + 1)
                    for g, d, s, r, a in part
                ]
            at = len(seen)
            step = self.steps[at]
            memory.most = memory.n_bytes
            self.begin(at)
            gathering, during = memory.most // element, self.elements
            saved = (
                sum([memory.alive.get(saved_key(index), 0) for index in step.parameters]) // element if self.in_backward else 0
            )
            memory.most = 0  # only a request sets it
            self.release(at, step)
            seen.append((gathering, during, saved, memory.most // element, self.elements))
        return seen
