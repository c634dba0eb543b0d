"""The gathered elements over a pass under ZeRO-3: the notes that a coordinator's pass leaves, and their summary."""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import NamedTuple

from zeroplan.engines.collecting import Counts
from zeroplan.engines.deepspeed.coordinator import SECOND, Coordinator, Pass, Sent, saved_key
from zeroplan.engines.deepspeed.order import BACKWARD, FORWARD, Step
from zeroplan.engines.rows import Sizes, embedding_elements, has_tied_head
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


@dataclass(frozen=True, eq=False, slots=True)
class Gathered:
    """Gathered elements over one pass, including copies; one object per model and options."""

    forward: tuple[int, ...]
    """The most during each block's forward; with experts, without the extra memory of their gather."""
    before_experts: tuple[int, ...]
    """The most in each block until its experts are gathered and have made nothing; 0 without experts."""
    head_gathering: int
    """The most while the parameters of final norm and head are gathered, before either has made anything."""
    head_forward: int
    """Gathered while the head runs forward."""
    norm_forward: int
    """Gathered while the final norm runs forward."""
    loss: int
    head: tuple[int, ...]
    """In the backward: at the loss, the head, the final norm."""
    past_head: int
    """The most when a gradient of head or final norm is made, including their gathered parameters."""
    backward: tuple[tuple[Note, ...], ...]
    """Notes of each block, in the order of its gradients."""
    first: int
    """The most in the forward before the first block."""
    below: tuple["Note", ...]
    """Notes of the backward of each module before the first block."""
    embedding: int
    end: int
    """The most from the gather of the embedding for its backward on."""
    sent_forward: Sent
    sent_backward: Sent
    persistent: int
    n_persistent: int
    """Elements and number of the parameters that stay gathered between steps."""
    persistent_sent: Sizes
    most_read: int = 0
    """The most parameters from NVMe whose buffers are in use at the same time."""
    read_twice: bool = False
    """A parameter is read ahead twice at the same time."""
    modules: tuple[tuple[tuple[str, Note], ...], ...] = ()
    """Notes of each block with frozen weights, by module name; and of its recomputation."""
    head_notes: tuple[Note, ...] = ()
    """Notes of the modules after the blocks, in the order of their gradients; for a profile."""
    tied_head: int = 0
    """Elements of a gradient that waits for the embedding's; for a profile."""

    def is_like(self, other: "Gathered") -> bool:
        """Whether every note is equal. ``==`` compares identity, which keeps look-ups fast."""
        return all(getattr(self, field.name) == getattr(other, field.name) for field in fields(self))


Noted = tuple[Step, Note]


class Taking:
    """Takes notes while the steps of a pass run."""

    def __init__(self, n_blocks: int) -> None:
        self.forward = [0] * n_blocks
        self.before_experts = [0] * n_blocks
        self.blocks: list[list[Noted]] = [[] for _ in range(n_blocks)]
        self.after_blocks: list[Noted] = []
        self.head_gathering = self.head_forward = self.norm_forward = self.loss = self.embedding = self.first = 0
        self.below: list[Note] = []

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

    def in_backward(self, step: Step, note: Note) -> None:
        """Note the elements held around a module's backward."""
        if step.block == len(self.blocks):
            self.after_blocks.append((step, note))
        elif step.block >= 0:
            self.blocks[step.block].append((step, note))
        else:
            self.embedding = max(self.embedding, note.gathering)
            self.below += [note] if step.parameters else []

    @property
    def head(self) -> tuple[int, int, int]:
        """In the backward: at the loss, the head, the final norm."""
        head = [note.gathering for _, note in self.after_blocks]
        return max(head[:-3], default=0), head[-min(3, len(head))], max(head[-2:])

    @property
    def past_head(self) -> int:
        """Elements held when the last gradient after the blocks is made, if more than a head and a norm follow the blocks."""
        return self.after_blocks[-1][1].during if len(self.after_blocks) > 2 else 0


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
    return _Replay(one).gathered() if one.trains else _with_forward_alone(one)


def _with_forward_alone(one: Pass) -> Gathered:
    """Return the gathered elements of a model that runs forwards only: the coordinator's trace ends with the head."""
    training = one._replace(trains=True)
    notes = _Replay(training, last_forward=True).run()
    return replace(
        gathered(training), forward=tuple(notes.forward), before_experts=tuple(notes.before_experts), loss=notes.head_forward,
        head_gathering=notes.head_gathering, head_forward=notes.head_forward, norm_forward=notes.norm_forward,
    )  # fmt: skip


@lru_cache(maxsize=64)
def gathered_by_several(one: Pass) -> Gathered | None:
    """Return the same with several micro-batches per step; None if nothing differs.

    The coordinator decides once, in the first pass with a complete trace, which parameters to release where
    (``__params_to_release`` is cached). With several micro-batches that pass is the second of the first step, before the step
    has gathered the persistent parameters.
    """
    first = _Replay(one, resident=False)
    first.decide()
    several = _Replay(one, decided=first.decided, later=True).gathered()
    return None if several.is_like(gathered(one)) else several


class _Elements(Counts):
    """Counts live bytes, and the most of them since a mark."""

    most: int = 0

    def request(self, key: Hashable, n_bytes: int, kind: Kind, reason: str) -> None:  # noqa: ARG002  as a log's
        """Request memory, if any."""
        self.alive[key] = self.alive.get(key, 0) + n_bytes
        self.n_bytes += n_bytes
        self.most = max(self.most, self.n_bytes)


class _Replay(Coordinator):
    """A pass of the coordinator that counts elements. Without quantization an element counts as one byte."""

    memory: _Elements

    def __init__(
        self, one: Pass, *, recording: bool = False, resident: bool = True, decided: set[tuple[int, int]] | None = None,
        later: bool = False, last_forward: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(
            one, _Elements(), element=one.sharing.width or 1, recording=recording, resident=resident, decided=decided,
            later=later, last_forward=last_forward,
        )  # fmt: skip
        self.whole, ways = one.whole, one.options.zero_hpz_partition_size
        for index, numel in enumerate(self.numel if later and ways > 1 else ()):  # the first micro-batch has left them
            n_bytes = 0 if index in self.persistent else self.element * ceil_div(numel, ways)
            self.memory.request(SECOND, n_bytes, Kind.GATHER, "second partition of a parameter")

    @property
    def elements(self) -> int:
        """The gathered elements."""
        return self.memory.n_bytes // self.element

    def decide(self) -> None:
        """Run all steps and record only where parameters are released."""
        for at, step in enumerate(self.steps):
            self.begin(at)
            self.release(at, step)

    def release(self, at: int, step: Step) -> None:
        """End the modules whose end a hook sees before the next module starts."""
        for freed in step.frees:
            self.free(at, freed)

    def run(self) -> Taking:
        """Run all steps and return notes of the gathered elements."""
        notes, memory, alive = Taking(self.whole.n_blocks), self.memory, self.memory.alive
        for at, step in enumerate(self.steps):
            if step.direction == BACKWARD and not self.turned:
                notes.loss = self.elements
            memory.most = memory.n_bytes
            self.begin(at)
            gathering, during = memory.most // self.element, self.elements
            if not self.turned:
                self.release(at, step)
                notes.in_forward(step, gathering, during)
                continue
            saved = sum([alive.get(saved_key(index), 0) for index in step.parameters]) // self.element
            self.release(at, step)
            notes.in_backward(step, Note(step.made, gathering, during, self.elements, during - saved))
        return notes

    def gathered(self) -> Gathered:
        """Run all steps and return the gathered elements."""
        notes, profiled = self.run(), self.whole.model.profile is not None
        backward, modules = self._of_blocks(notes.blocks)
        return Gathered(
            forward=tuple(notes.forward),
            before_experts=tuple(notes.before_experts),
            head_gathering=notes.head_gathering,
            head_forward=notes.head_forward,
            norm_forward=notes.norm_forward,
            loss=notes.loss,
            head=notes.head,
            past_head=notes.past_head,
            backward=backward,
            first=notes.first,
            below=tuple(notes.below),
            embedding=notes.embedding,
            end=self.elements,
            sent_forward=self.sent[FORWARD],
            sent_backward=self.sent[BACKWARD],
            persistent=sum(self.numel[index] for index in self.persistent),
            n_persistent=len(self.persistent),
            persistent_sent=tuple(sorted(Counter(self.numel[index] for index in self.persistent).items())),
            most_read=self.most_read,
            read_twice=self.read_twice,
            modules=modules,
            head_notes=per_gradient(notes.after_blocks) if profiled else (),
            tied_head=embedding_elements(self.whole) if profiled and has_tied_head(self.whole) else 0,
        )

    def _of_blocks(
        self, blocks: list[list[Noted]]
    ) -> tuple[tuple[tuple[Note, ...], ...], tuple[tuple[tuple[str, Note], ...], ...]]:
        """Return the notes of each block by gradients; and by modules, if some weights are frozen."""
        if all(self.whole.trained):
            return tuple(map(per_gradient, blocks)), ()
        making = ([(step, note) for step, note in block if not self._idle(step)] for block in blocks)
        return tuple(map(per_gradient, making)), tuple(map(per_module, blocks))

    def _idle(self, step: Step) -> bool:
        """Whether a module has parameters and makes no gradients."""
        return bool(step.parameters) and not any(self.whole.trained[index] for index in step.parameters)
