"""The peak and the reserved band follow from the moments."""

from zeroplan import Kind, Line, Moment, Phase
from zeroplan.timeline import peak, reserved


def moment(name: str, **sizes: int) -> Moment:
    return Moment(name, Phase.FORWARD, tuple(Line(Kind[kind], n_bytes, kind) for kind, n_bytes in sizes.items()))


def test_the_earliest_of_equal_moments_is_the_peak():
    moments = (moment("low", PARAMETERS=1), moment("first", PARAMETERS=3), moment("second", GRADIENTS=3))
    assert peak(moments).name == "first"


def test_the_reserved_band_by_hand():
    """Peak 11; pools: compute 9 (6+3), gather 5, reduce 0 -> 14; kinds: 6 + 3 + 5 + 4 = 18."""
    moments = (
        moment("gathering", PARAMETERS=6, GATHER=5),
        moment("computing", PARAMETERS=6, ACTIVATIONS=3),
        moment("stepping", PARAMETERS=2, OPTIMIZER_TEMPORARY=4),
    )
    assert reserved(moments) == (11, 14, 18)


def test_the_band_is_ordered_and_starts_at_the_peak():
    moments = (moment("a", GATHER=5, REDUCE=1), moment("b", GATHER=1, REDUCE=5, LOGITS=2))
    low, expected, high = reserved(moments)
    assert low == peak(moments).total_bytes == 8
    assert low <= expected <= high
