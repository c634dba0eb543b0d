"""One of two things that are compared: what is alive at its peak, what is held, what is sent, with which settings."""

import re
from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

from zeroplan.ledger import NOT_TOLD_APART, Kind
from zeroplan.spec.job import JobSpec

Grain = Literal["tensor", "module", "place", "kind"]
"""How finely a thing tells its memory apart: by tensor, by module, by the line of code that asked, or by kind alone."""

_NUMBER = re.compile(r"\d[\d,]*")
_OF_MANY = re.compile(r"(\d[\d,]*) of (\d[\d,]*)")
_LAYER = re.compile(r"(^|\.)\d+(?=[.:]|$)")
_WRAPPERS = frozenset({"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})


class Held(NamedTuple):
    """Bytes of one kind, and what they are; ``blocks`` has their sizes and how many there are of each, where blocks are known."""

    kind: str
    what: str
    n_bytes: int
    blocks: tuple[tuple[int, int], ...] = ()


class At(NamedTuple):
    """A moment and what is alive then; ``lines`` is empty where only the sum is known. The phase is as a run has it. [bytes]"""

    name: str
    phase: str
    n_bytes: int
    lines: tuple[Held, ...] = ()


class Sent(NamedTuple):
    """Collectives of one sort in a step: the bytes of their buffers, and what one GPU sends, where that is known. [bytes]"""

    operation: str
    what: str
    payload_bytes: int
    sent_bytes: int | None = None


class Side(NamedTuple):
    """One of the two. The lines of its peak add up to the peak. [bytes]"""

    name: str
    """What the user called it: a file, or flags."""
    is_a: str
    """``estimate``, ``record``, ``dry run``, ``snapshot`` or ``trace``."""
    grain: Grain
    peak: At
    moments: tuple[At, ...] = ()
    """Named moments beside the peak, or the highest of each phase."""
    held: tuple[Held, ...] | None = None
    """What is held between steps; None where it is not known."""
    sent: tuple[Sent, ...] | None = None
    totals: Mapping[str, int] = {}
    settings: Mapping[str, str] = {}
    job: JobSpec | None = None
    verdict: str = ""
    tensors: str = ""
    """Whose memory it counts: ``cuda``, ``cpu`` or ``fake`` tensors; empty where that is not known."""
    notes: tuple[str, ...] = ()
    step_s: float | None = None
    """The estimated time of a step, where a GPU is named and its time is known. [s]"""
    tokens_per_s: float | None = None
    """The tokens that one GPU then trains per second."""


def with_remainder(lines: Iterable[Held], n_bytes: int) -> tuple[Held, ...]:
    """The lines, with a last one for what they leave of a sum.

    >>> with_remainder([Held("parameters", "", 3)], 5)[-1]
    Held(kind='not told apart', what='', n_bytes=2, blocks=())
    """
    every = tuple(lines)
    left = n_bytes - sum(line.n_bytes for line in every)
    return (*every, Held(NOT_TOLD_APART, "", left)) if left else every


def of_kinds(kinds: Mapping[str, int], n_bytes: int) -> tuple[Held, ...]:
    """A ledger by kind as lines that add up to a sum."""
    return with_remainder((Held(kind, "", size) for kind, size in kinds.items() if size), n_bytes)


def by_kind(lines: Iterable[Held]) -> tuple[Held, ...]:
    """The lines of each kind as one; gradients of activations are temporaries, since a run cannot tell them apart."""
    sums: dict[str, int] = {}
    for line in lines:
        kind = Kind.TEMPORARY.value if line.kind == Kind.ACTIVATION_GRADIENTS.value else line.kind
        sums[kind] = sums.get(kind, 0) + line.n_bytes
    return tuple(Held(kind, "", size) for kind, size in sums.items())


def loosened(name: str) -> str:
    """A name whose numbers say nothing.

    >>> loosened("inputs of all 32 blocks")
    'inputs of all # blocks'
    """
    return _NUMBER.sub("#", name)


def from_the_nearer_end(name: str) -> str:
    """A moment's name with blocks counted from the nearer end of the model: of any depth, the last block but one is one moment.

    >>> from_the_nearer_end("backward of block 31 of 32"), from_the_nearer_end("backward of block 2 of 32")
    ('backward of block 1 from the end', 'backward of block 2')
    """
    return _OF_MANY.sub(_counted, name)


def _counted(found: re.Match[str]) -> str:
    number, many = (int(group.replace(",", "")) for group in found.groups())
    return f"{number}" if 2 * number <= many else f"{many - number} from the end"


def layers_together(name: str) -> str:
    """A module's name, the same for all layers, and without wrappers.

    >>> layers_together("module.layers.3._checkpoint_wrapped_module.mlp")
    'layers.*.mlp'
    """
    return _LAYER.sub(r"\1*", ".".join(part for part in name.split(".") if part not in _WRAPPERS))
