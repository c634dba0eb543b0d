"""How many tokens does a rank receive? Applies ``--imbalance`` to doubles that exchange tokens without a collective."""

from typing import NamedTuple

from zeroplan.verify.fake_cuda.known_values import Sure
from zeroplan.verify.fake_cuda.stand_ins import StandIns


class _Assumed(NamedTuple):
    imbalance: float
    stand_ins: StandIns


_now: list[_Assumed] = []
"""The current assumption; the process has one script."""


def assume(imbalance: float, stand_ins: StandIns) -> None:
    """Set the multiple of the even share that a rank receives, and the list of assumptions."""
    _now[:] = [_Assumed(imbalance, stand_ins)]


def received(tokens: int, sure: Sure) -> int:
    """The number of received tokens: ``tokens`` if the choice is known, else ``tokens`` times the imbalance."""
    if sure is Sure.EXACT or not _now:
        return tokens
    _now[-1].stand_ins.note_choice(Sure.EXCHANGED, sized=True)
    return round(tokens * _now[-1].imbalance)
