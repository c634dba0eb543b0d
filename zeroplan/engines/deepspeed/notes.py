"""The gathered elements over a pass under ZeRO-3: the notes of a replay, and their summary."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

from zeroplan.engines.deepspeed.order import BACKWARD, Step
from zeroplan.engines.rows import Sizes

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


class Sent(NamedTuple):
    """The all-gathers of one direction of a pass: sizes, number of calls, and all ranks' scales for 8-bit gathers."""

    sizes: Sizes
    calls: int
    scales: int


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


def sizes(counted: Counter[int]) -> Sizes:
    """Return parameter sizes and their counts, the smallest first."""
    return tuple(sorted(counted.items()))


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
