"""How many tokens do the experts of the fullest rank get, relative to the mean? From a ratio, measured or random loads."""

import re
from pathlib import Path
from typing import Final

import numpy as np

from zeroplan.catalog.text import read_text
from zeroplan.errors import SpecError

_LOGNORMAL = re.compile(r"lognormal\(\s*([0-4](?:\.\d*)?|5)\s*\)")
_FORMS = "a number from 1 on, a file with the load of every expert, nor lognormal(SPREAD) with a SPREAD of 0 to 5"
#: Random draws of a layer's loads, and the percentile of the fullest rank that is used.
_DRAWS, _CAREFUL = 199, 95
#: A capacity factor that papers train with (Switch Transformer, arXiv:2101.03961, section 2.2).
_CAPACITY: Final = 1.25


def imbalance_of(given: str | float, *, experts: int, ranks: int) -> tuple[float, str]:
    """Return the fullest rank's tokens divided by the mean, and a note; raises SpecError for invalid loads.

    A file has one line per layer with a number per expert, or one number per line for all layers.

    >>> imbalance_of("1.5", experts=8, ranks=4)
    (1.5, '')
    """
    try:
        ratio = float(given)
    except ValueError:
        return _of_loads(str(given), experts, ranks)
    if not 1 <= ratio <= min(ranks, 1e6):
        raise SpecError(f"--imbalance {given}: the fullest of {ranks} ranks has 1 to {ranks} times the mean")
    return ratio, ""


def _of_loads(given: str, experts: int, ranks: int) -> tuple[float, str]:
    drawn = _LOGNORMAL.fullmatch(given.strip())
    rows = _rows(given, experts) if drawn is None else np.random.default_rng(0).lognormal(0, float(drawn[1]), (_DRAWS, experts))
    shares = rows / rows.mean(axis=1, keepdims=True)
    of_ranks = np.sort(shares.reshape(len(rows), ranks, -1).mean(axis=2).max(axis=1))
    load = float(of_ranks[-1] if drawn is None else of_ranks[len(of_ranks) * _CAREFUL // 100])
    dropped = float(np.maximum(shares - _CAPACITY, 0).mean(axis=1).max())
    where = f"in the worst of {len(rows):,} layers" if drawn is None else f"in {_CAREFUL} of 100 draws at the most"
    return load, (
        f"loads of experts: {where}, the fullest rank gets {load:.2f} times the mean; the fullest expert gets up to "
        f"{shares.max():.2f} times, and a capacity factor of {_CAPACITY} would drop up to {dropped:.1%} of the tokens' choices"
    )


def _rows(given: str, experts: int) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    try:
        lines = [line.split() for line in read_text(Path(given), what="file of loads").splitlines() if line.strip()]
        found = np.array([[line[0] for line in lines]] if {*map(len, lines)} == {1} else lines, dtype=np.float64)
    except SpecError as error:
        raise SpecError(f"--imbalance {given!r} is neither {_FORMS}: {error}") from None
    except ValueError:
        raise SpecError(f"--imbalance {given!r} is neither {_FORMS}") from None
    if found.ndim != 2 or found.shape[1] != experts:
        raise SpecError(
            f"--imbalance {given!r}: a line has the load of each of the model's {experts} experts, or all lines one"
        )
    if not np.isfinite(found).all() or found.min() < 0 or not found.sum(axis=1).all():
        raise SpecError(f"--imbalance {given!r}: loads are 0 or more, and not all of a layer 0")
    return found
