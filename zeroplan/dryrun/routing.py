"""How many tokens a rank receives where nobody knows: ``--imbalance`` for doubles that exchange tokens without a collective."""

from typing import NamedTuple

from zeroplan.verify.fake_cuda.known_values import Sure
from zeroplan.verify.fake_cuda.stand_ins import StandIns


class _Assumed(NamedTuple):
    imbalance: float
    stand_ins: StandIns


_now: list[_Assumed] = []
"""Of the process, which has one script."""


def assume(imbalance: float, stand_ins: StandIns) -> None:
    """Set how many times the even share this rank receives, and who notes that sizes depend on it."""
    _now[:] = [_Assumed(imbalance, stand_ins)]


def received(tokens: int, sure: Sure) -> int:
    """How many tokens arrive where the even share is ``tokens``. A choice that is known is taken as it is."""
    if sure is Sure.EXACT or not _now:
        return tokens
    _now[-1].stand_ins.note_choice(Sure.EXCHANGED, sized=True)
    return round(tokens * _now[-1].imbalance)
