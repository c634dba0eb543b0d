"""What is held gathered in the course of a pass under ZeRO-3: the notes that are taken, and what they come to."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import NamedTuple

from zeroplan.engines.deepspeed.order import BACKWARD, Step
from zeroplan.engines.rows import Sizes

#: The key of the notes on a block's recomputation as a whole; before a module's name, of that when this module is gathered.
RECOMPUTED = "recomputed"


class Note(NamedTuple):
    """Elements held around one module's backward."""

    made: int
    """Elements of the block's gradients made when it is done."""
    gathering: int
    """Most while its parameters are gathered."""
    during: int
    after: int
    handing: int
    """When its gradients are passed on, and autograd has release what its operators saved."""


class Sent(NamedTuple):
    """What is all-gathered in one direction of a pass, in this many calls; with scales, of all ranks, where it is in 8 bits."""

    sizes: Sizes
    calls: int
    scales: int


@dataclass(frozen=True, eq=False, slots=True)
class Gathered:
    """Elements gathered in the course of one pass, copies and all; one object per model and options."""

    forward: tuple[int, ...]
    """Most during the forward of each block; where it has experts, less what gathering them takes for a moment."""
    before_experts: tuple[int, ...]
    """Most until the experts of each block are gathered and have made nothing yet; 0 where it has none."""
    head_gathering: int
    """Most while what the final norm and the head need is gathered, before either has made anything."""
    head_forward: int
    """While the head runs forward."""
    norm_forward: int
    """While the final norm does."""
    loss: int
    head: tuple[int, ...]
    """In the backward: at the loss, the head, the final norm."""
    past_head: int
    """Most when a gradient of the head or the final norm is made, with what they need gathered."""
    backward: tuple[tuple[Note, ...], ...]
    """Of each block, in the order of its gradients."""
    embedding: int
    end: int
    """Most while the embedding is gathered for its backward, and from then on."""
    sent_forward: Sent
    sent_backward: Sent
    persistent: int
    n_persistent: int
    """Elements and number of the parameters that are never released between steps."""
    persistent_sent: Sizes
    most_read: int = 0
    """Most parameters read from NVMe whose buffers are in use at once."""
    read_twice: bool = False
    """One is read ahead twice at a time."""
    modules: tuple[tuple[tuple[str, Note], ...], ...] = ()
    """Of each block with frozen weights, by the name of the module; and of its recomputation."""
    head_notes: tuple[Note, ...] = ()
    """Of what is after the blocks, in the order of its gradients; of a profile."""
    tied_head: int = 0
    """Elements of a gradient among those that waits for the embedding's; of a profile."""

    def is_like(self, other: "Gathered") -> bool:
        """Whether every note is the same; equality is identity, which makes these fast to look up."""
        return all(getattr(self, field.name) == getattr(other, field.name) for field in fields(self))


Noted = tuple[Step, Note]


class Taking:
    """Takes notes while the steps of a pass are run."""

    def __init__(self, n_blocks: int) -> None:
        self.forward = [0] * n_blocks
        self.before_experts = [0] * n_blocks
        self.blocks: list[list[Noted]] = [[] for _ in range(n_blocks)]
        self.after_blocks: list[Noted] = []
        self.head_gathering = self.head_forward = self.norm_forward = self.loss = self.embedding = 0

    def in_forward(self, step: Step, gathering: int, during: int) -> None:
        """Note the most while a module's parameters are gathered, and what is held as it runs."""
        if step.block == len(self.forward):
            self.head_gathering = max(self.head_gathering, gathering)
            self.norm_forward, self.head_forward = self.head_forward, during
        elif step.block >= 0:
            if step.has_experts:
                self.before_experts[step.block], gathering = max(self.forward[step.block], gathering), during
            self.forward[step.block] = max(self.forward[step.block], gathering)

    def in_backward(self, step: Step, note: Note) -> None:
        """Note what is held around a module's backward."""
        if step.block == len(self.blocks):
            self.after_blocks.append((step, note))
        elif step.block >= 0:
            self.blocks[step.block].append((step, note))
        else:
            self.embedding = max(self.embedding, note.gathering)

    @property
    def head(self) -> tuple[int, int, int]:
        """In the backward: at the loss, the head, the final norm."""
        head = [note.gathering for _, note in self.after_blocks]
        return max(head[:-3], default=0), head[-min(3, len(head))], max(head[-2:])

    @property
    def past_head(self) -> int:
        """When the last gradient after the blocks is made, where there is more than a head and a norm."""
        return self.after_blocks[-1][1].during if len(self.after_blocks) > 2 else 0


def sizes(counted: Counter[int]) -> Sizes:
    """Elements of parameters and how many there are of each size, the smallest first."""
    return tuple(sorted(counted.items()))


def per_gradient(notes: Iterable[Noted]) -> tuple[Note, ...]:
    """Merge notes into one per number of gradients made; what a module without parameters fetches is there after the one before."""
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
    """Name notes after modules; those of a recomputation hold most until then, and the last of them has a name of its own."""
    named: dict[str, Note] = {}
    for step, note in notes:
        if step.direction == BACKWARD:
            named[step.name] = note
            continue
        most = max(note.gathering, named[RECOMPUTED].gathering if RECOMPUTED in named else 0)
        named[RECOMPUTED] = named[f"{RECOMPUTED}: {step.name}"] = note._replace(gathering=most)
    return tuple(named.items())


def rising(first: int, n_blocks: int, held: Callable[[int], int]) -> tuple[tuple[int, int], ...]:
    """The last of this many blocks, and earlier ones at which more is gathered than at all after them; with the elements gathered.

    >>> rising(1, 3, lambda block: {1: 7, 2: 4, 3: 5}[block])
    ((3, 5), (1, 7))
    """
    chosen: list[tuple[int, int]] = []
    for block in range(first + n_blocks - 1, first - 1, -1):
        elements = held(block)
        if not chosen or elements > chosen[-1][1]:
            chosen.append((block, elements))
    return tuple(chosen)
