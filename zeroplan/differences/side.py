"""The common form of everything that can be compared: the lines at the peak, the moments, collectives, sums and settings."""

import re
from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

from zeroplan.ledger import NOT_TOLD_APART, Kind
from zeroplan.spec.job import JobSpec

Grain = Literal["tensor", "module", "place", "kind"]
"""The unit in which a side lists its memory: by tensor, by module, by the line of code that requested it, or only by kind."""

_NUMBER = re.compile(r"\d[\d,]*")
_OF_MANY = re.compile(r"(\d[\d,]*) of (\d[\d,]*)")
_LAYER = re.compile(r"(^|\.)\d+(?=[.:]|$)")
_WRAPPERS = frozenset({"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})


class Held(NamedTuple):
    """A line: bytes of one kind, with a name. ``blocks``, if known: each size of block, and the number of that size."""

    kind: str
    what: str
    n_bytes: int
    blocks: tuple[tuple[int, int], ...] = ()


class At(NamedTuple):
    """A moment and its lines; ``lines`` is empty if only the sum is known. The phase has a run's name. [bytes]"""

    name: str
    phase: str
    n_bytes: int
    lines: tuple[Held, ...] = ()


class Sent(NamedTuple):
    """The collectives of one type in a step: the bytes of their buffers, and the bytes that one GPU sends, if known. [bytes]"""

    operation: str
    what: str
    payload_bytes: int
    sent_bytes: int | None = None


class Side(NamedTuple):
    """One side of a comparison. The lines of its peak add up to the peak. [bytes]"""

    name: str
    """Its name for the user: a file or flags."""
    is_a: str
    """``estimate``, ``record``, ``dry run``, ``snapshot`` or ``trace``."""
    grain: Grain
    peak: At
    moments: tuple[At, ...] = ()
    """All named moments, or the peak of each phase."""
    held: tuple[Held, ...] | None = None
    """The lines held between steps; None if unknown."""
    sent: tuple[Sent, ...] | None = None
    totals: Mapping[str, int] = {}
    settings: Mapping[str, str] = {}
    job: JobSpec | None = None
    verdict: str = ""
    tensors: str = ""
    """The tensors that it counts: ``cuda``, ``cpu`` or ``fake``; empty if unknown."""
    notes: tuple[str, ...] = ()
    step_s: float | None = None
    """The estimated time of a step; None if unknown. [s]"""
    tokens_per_s: float | None = None
    """The estimated tokens/s per GPU; None if unknown."""


def with_remainder(lines: Iterable[Held], n_bytes: int) -> tuple[Held, ...]:
    """Return the lines, with a last line for the remainder to ``n_bytes``.

    >>> with_remainder([Held("parameters", "", 3)], 5)[-1]
    Held(kind='not told apart', what='', n_bytes=2, blocks=())
    """
    every = tuple(lines)
    left = n_bytes - sum(line.n_bytes for line in every)
    return (*every, Held(NOT_TOLD_APART, "", left)) if left else every


def of_kinds(kinds: Mapping[str, int], n_bytes: int) -> tuple[Held, ...]:
    """Return sums by kind as lines that add up to ``n_bytes``."""
    return with_remainder((Held(kind, "", size) for kind, size in kinds.items() if size), n_bytes)


def by_kind(lines: Iterable[Held]) -> tuple[Held, ...]:
    """Return one line per kind; gradients of activations count as temporaries, since a run cannot distinguish them."""
    sums: dict[str, int] = {}
    for line in lines:
        kind = Kind.TEMPORARY.value if line.kind == Kind.ACTIVATION_GRADIENTS.value else line.kind
        sums[kind] = sums.get(kind, 0) + line.n_bytes
    return tuple(Held(kind, "", size) for kind, size in sums.items())


def loosened(name: str) -> str:
    """Return a name with its numbers replaced, for comparison.

    >>> loosened("inputs of all 32 blocks")
    'inputs of all # blocks'
    """
    return _NUMBER.sub("#", name)


def from_the_nearer_end(name: str) -> str:
    """Return a moment's name with the block's number counted from the nearer end of the model, to match models of any depth.

    >>> from_the_nearer_end("backward of block 31 of 32"), from_the_nearer_end("backward of block 2 of 32")
    ('backward of block 1 from the end', 'backward of block 2')
    """
    return _OF_MANY.sub(_counted, name)


def _counted(found: re.Match[str]) -> str:
    number, many = (int(group.replace(",", "")) for group in found.groups())
    return f"{number}" if 2 * number <= many else f"{many - number} from the end"


def layers_together(name: str) -> str:
    """Return a module's name without its layer's number and without wrappers.

    >>> layers_together("module.layers.3._checkpoint_wrapped_module.mlp")
    'layers.*.mlp'
    """
    return _LAYER.sub(r"\1*", ".".join(part for part in name.split(".") if part not in _WRAPPERS))
