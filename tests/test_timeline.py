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


def test_fsdp2_makes_what_goes_into_a_reduction_where_it_computes_and_what_comes_out_elsewhere():
    """Pools: compute 8 (6+2), gather 5, shards of the gradients 3; elsewhere compute 10 (6+3+1), gather 5, reduce 2."""
    moments = (
        moment("reducing", PARAMETERS=6, REDUCE=2, GATHER=5),
        moment("reduced", PARAMETERS=6, GRADIENTS=3),
        moment("stepping", PARAMETERS=6, GRADIENTS=3, OPTIMIZER_TEMPORARY=1),
    )
    assert reserved(moments, engine="fsdp2").expected_bytes == 8 + 5 + 3
    assert reserved(moments, engine="deepspeed").expected_bytes == 10 + 5 + 2


def test_the_band_is_ordered_and_starts_at_the_peak():
    moments = (moment("a", GATHER=5, REDUCE=1), moment("b", GATHER=1, REDUCE=5, LOGITS=2))
    low, expected, high = reserved(moments)
    assert low == peak(moments).total_bytes == 8
    assert low <= expected <= high
