"""Sequences of several lengths: which micro-batch is the longest? It decides the peak of a run.

A run passes its sequences in one order of many. Orders are drawn with a fixed seed, so the same lengths give the same answer.
"""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from zeroplan.errors import SpecError

if TYPE_CHECKING:
    import numpy as np

    Drawn = np.ndarray[tuple[int, ...], np.dtype[np.int64]]

#: Orders that are drawn, and lengths of all of them together at the most.
_ORDERS: Final = 199
_MOST_DRAWN: Final = 20_000_000
_MOST_SEQUENCES: Final = _MOST_DRAWN // 9
#: The order that decides, of a hundred: most runs have no longer micro-batch.
CAREFUL: Final = 95
_LOGNORMAL = re.compile(r"lognormal\(\s*([\d.]+)\s*,\s*([\d.]+)\s*,\s*(\d+)\s*\)")
_FORMS = "a file with one length per line nor lognormal(MEAN,SPREAD,SEQUENCES), for example lognormal(290,0.5,8000)"


class Lognormal(NamedTuple):
    """Lengths of which only a few numbers are known: the logarithm is normally distributed."""

    mean: float
    """Tokens of a sequence, on average."""
    spread: float
    """Standard deviation of the logarithm."""
    sequences: int


class Longest(NamedTuple):
    """The longest micro-batch of a run, over the orders that were drawn."""

    micro_batches: int
    found: tuple[int, ...]
    """Tokens of the longest in each order, ascending; padding included."""
    sequences: int
    """Sequences of a padded micro-batch; 1 without padding."""

    def within(self, percent: int) -> int:
        """Tokens of one sequence of the micro-batch that the longest is within, in so many of a hundred orders."""
        return self.found[min(len(self.found) - 1, percent * len(self.found) // 100)] // self.sequences


def lengths_of(text: str) -> "Lognormal | Drawn":
    """Return what ``--lengths`` says; raises SpecError for a file that cannot be read and for numbers that are no lengths."""
    said = _LOGNORMAL.fullmatch(text.strip())
    if said is None:
        return _of_file(text)
    found = Lognormal(float(said[1]), float(said[2]), int(said[3]))
    if not (1 <= found.mean <= 1e9 and found.spread <= 5 and 1 <= found.sequences <= _MOST_SEQUENCES):
        raise SpecError(f"--lengths {text!r}: MEAN is 1 to 1e9 tokens, SPREAD 0 to 5, SEQUENCES 1 to {_MOST_SEQUENCES:,}")
    return found


def _of_file(text: str) -> "Drawn":
    import numpy as np  # noqa: PLC0415  keeps start-up fast

    try:
        found = np.array([int(line) for line in Path(text).read_text(encoding="utf-8").split()], dtype=np.int64)
    except (OSError, ValueError, OverflowError):
        raise SpecError(f"--lengths {text!r} is neither {_FORMS}") from None
    if not 1 <= len(found) <= _MOST_SEQUENCES or found.min() < 1:
        raise SpecError(f"--lengths {text!r}: a file has 1 to {_MOST_SEQUENCES:,} lengths of 1 token or more")
    return found


def longest_of(lengths: "Lognormal | Drawn", *, cut: int, micro_batch: int, padding_free: bool) -> Longest:
    """Return the longest micro-batch of each order drawn; sequences are cut at so many tokens. A last, smaller one counts too.

    Padding makes all sequences of a micro-batch as long as its longest; without it they are joined.
    """
    import numpy as np  # noqa: PLC0415

    draw = np.random.default_rng(0)
    count = lengths.sequences if isinstance(lengths, Lognormal) else len(lengths)
    found = []
    for _ in range(max(9, min(_ORDERS, _MOST_DRAWN // count))):
        if isinstance(lengths, Lognormal):
            middle = np.log(lengths.mean) - lengths.spread**2 / 2
            order = np.ceil(draw.lognormal(middle, lengths.spread, count)).astype(np.int64)
        else:
            order = draw.permutation(lengths)
        cut_off = np.minimum(order, cut)
        starts = np.arange(0, count, micro_batch)
        joined = np.add if padding_free else np.maximum
        tokens = int(joined.reduceat(cut_off, starts).max())
        found.append(tokens if padding_free else tokens * micro_batch)
    return Longest(-(-count // micro_batch), tuple(sorted(found)), 1 if padding_free else micro_batch)


def note_of(longest: Longest, taken: int, *, drawn: bool) -> str:
    """Return a line on what was taken, and on what other orders have; ``drawn``: lengths were not read from a file."""
    each, half = (f"{longest.sequences} x {tokens:,}" for tokens in (taken, longest.within(50)))
    return (
        f"sequences differ in length: the longest of {longest.micro_batches:,} micro-batches is taken, {each} tokens; {CAREFUL} of "
        f"100 orders of the sequences have none that is longer, and half have none longer than {half}"
        + ("; these lengths are drawn, and the longest sequence of real data can be longer: a file shows it" if drawn else "")
    )
