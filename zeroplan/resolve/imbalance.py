"""How unevenly are experts visited? A ratio, measured loads, or drawn ones: what the fullest rank gets beside the mean."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from zeroplan.catalog.text import read_text
from zeroplan.errors import SpecError

if TYPE_CHECKING:
    import numpy as np

    Loads = np.ndarray[tuple[int, int], np.dtype[np.float64]]

_LOGNORMAL = re.compile(r"lognormal\(\s*([\d.]+)\s*\)")
#: Draws of the loads of a layer, and how many of a hundred have no fuller rank than the one that is taken.
_DRAWS, _CAREFUL = 199, 95
#: A capacity factor that papers train with (Switch Transformer, arXiv:2101.03961, section 2.2).
_CAPACITY: Final = 1.25


class Imbalance(NamedTuple):
    """Loads of the fullest rank and of the fullest expert, beside the mean."""

    of_rank: float
    note: str


def imbalance_of(said: str | float, *, experts: int, ranks: int) -> Imbalance:
    """Return what ``--imbalance`` says of this many experts on this many ranks; raises SpecError for what is no load.

    A file has a number for each expert, in one line per layer or in one line for all.

    >>> imbalance_of("1.5", experts=8, ranks=4).of_rank
    1.5
    """
    ratio = _number(said)
    if ratio is not None:
        if not 1 <= ratio <= min(ranks, 1e6):
            raise SpecError(f"--imbalance {said}: the fullest of {ranks} ranks has 1 to {ranks} times the mean")
        return Imbalance(ratio, "")
    import numpy as np  # noqa: PLC0415  keeps start-up fast

    drawn = _LOGNORMAL.fullmatch(str(said).strip())
    loads = _drawn(float(drawn[1]), experts) if drawn else _of_file(str(said), experts)
    shares = loads / loads.mean(axis=1, keepdims=True)
    of_ranks = np.sort(shares.reshape(len(loads), ranks, -1).mean(axis=2).max(axis=1))
    taken = float(of_ranks[len(of_ranks) * _CAREFUL // 100] if drawn else of_ranks[-1])
    dropped = float(np.maximum(shares - _CAPACITY, 0).mean(axis=1).max())
    where = f"in {_CAREFUL} of 100 draws" if drawn else f"in the worst of {len(loads):,} layers"
    return Imbalance(
        taken,
        f"loads of experts: {where}, the fullest rank gets {taken:.2f} times the mean; the fullest expert gets up to "
        f"{shares.max():.2f} times, and a capacity factor of {_CAPACITY} would drop up to {dropped:.1%} of the tokens' choices",
    )


def _number(said: str | float) -> float | None:
    try:
        return float(said)
    except ValueError:
        return None


def _drawn(spread: float, experts: int) -> "Loads":
    import numpy as np  # noqa: PLC0415

    if spread > 5:
        raise SpecError(f"--imbalance lognormal({spread:g}): SPREAD is 0 to 5")
    return np.random.default_rng(0).lognormal(0, spread, (_DRAWS, experts))


def _of_file(said: str, experts: int) -> "Loads":
    import numpy as np  # noqa: PLC0415

    forms = "a number from 1 on, a file with the load of every expert, nor lognormal(SPREAD)"
    try:
        lines = [line.split() for line in read_text(Path(said), what="file of loads").splitlines() if line.strip()]
        rows = [[number for line in lines for number in line]] if all(len(line) == 1 for line in lines) else lines
        found = np.array([[float(number) for number in row] for row in rows], dtype=np.float64)
    except SpecError as error:
        raise SpecError(f"--imbalance {said!r} is neither {forms}: {error}") from None
    except ValueError:
        raise SpecError(f"--imbalance {said!r} is neither {forms}") from None
    if found.ndim != 2 or found.shape[1] != experts:
        raise SpecError(
            f"--imbalance {said!r}: a line has the load of each of the model's {experts} experts, or all lines have one"
        )
    if not np.isfinite(found).all() or found.min() < 0 or (found.sum(axis=1) <= 0).any():
        raise SpecError(f"--imbalance {said!r}: loads are 0 or more, and not all of a layer 0")
    return found
