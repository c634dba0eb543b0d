"""Checks the peak and the band of reserved memory, which follow from moments and from replays of real engines."""

from itertools import pairwise

import numpy as np
import pytest

from zeroplan import Kind, Line, Moment, Phase, RecipeSpec, estimate, job, weights
from zeroplan.engines.reserved_shares import Shares, shares_of
from zeroplan.ledger import Role, Tag
from zeroplan.timeline import Sizes, expected_bytes, measured_from, own_pools, peak, reserved, sizes_of, under_pressure
from zeroplan.trace import Entry, Inside, highest_of
from zeroplan.weights import POOLS

PAPER, FSDP2, DDP = RecipeSpec(engine="paper"), RecipeSpec(engine="fsdp2"), RecipeSpec(engine="ddp", zero_stage=0)


def moment(name: str, phase: Phase = Phase.FORWARD, **sizes: int) -> Moment:
    return Moment(name, phase, tuple(Line(Kind[kind], n_bytes, kind) for kind, n_bytes in sizes.items()))


def test_the_earliest_of_equal_moments_is_the_peak():
    moments = (moment("low", PARAMETERS=1), moment("first", PARAMETERS=3), moment("second", GRADIENTS=3))
    assert peak(moments).name == "first"


def test_the_band_on_paper_by_hand():
    """Peak 11; one stream; kinds: 6 + 3 + 5 + 4 = 18."""
    moments = (
        moment("gathering", PARAMETERS=6, GATHER=5),
        moment("computing", PARAMETERS=6, ACTIVATIONS=3),
        moment("stepping", PARAMETERS=2, OPTIMIZER_TEMPORARY=4),
    )
    assert reserved(sizes_of(moments, PAPER), PAPER) == (11, 11, 18)
    assert under_pressure(sizes_of(moments, PAPER), PAPER) == (11, 11, 18)


def test_fsdp2_makes_what_goes_into_a_reduction_where_it_computes_and_what_comes_out_elsewhere():
    """Compute 8 (6+2), gather 5, shards of the gradients 3; in DeepSpeed's stage 3 compute 10 (6+3+1), gather 5, reduce 2."""
    moments = (
        moment("reducing", PARAMETERS=6, REDUCE=2, GATHER=5),
        moment("reduced", PARAMETERS=6, GRADIENTS=3),
        moment("stepping", PARAMETERS=6, GRADIENTS=3, OPTIMIZER_TEMPORARY=1),
    )
    assert sizes_of(moments, FSDP2).streams == 8 + 5 + 3
    assert sizes_of(moments, RecipeSpec(engine="deepspeed")).streams == 10 + 5 + 2


def test_one_rank_of_fsdp2_casts_parameters_on_the_compute_stream():
    """Compute 11 (6+5), not 9 and 5 apart: it gathers nothing, and ``wait_for_unshard`` runs on the current stream."""
    cast = Line(Kind.GATHER, 5, "cast", tag=Tag(Role.COPIED_OUT))
    unsharding = Moment("unsharding", Phase.FORWARD, (Line(Kind.PARAMETERS, 6, "parameters"), cast))
    assert sizes_of((unsharding, moment("computing", PARAMETERS=6, ACTIVATIONS=3)), FSDP2).streams == 11
    alone, two = (estimate(job(model="gpt2", gpus=gpus, engine="fsdp2", stage=3)) for gpus in (1, 2))
    copied = [{line.tag.role for moment in one.moments for line in moment.lines if line.n_bytes} for one in (alone, two)]
    assert [Role.COPIED_OUT in roles for roles in copied] == [True, False]


@pytest.mark.parametrize(
    ("recipe", "pool"),
    [
        (DDP, "compute"),
        (RecipeSpec(engine="deepspeed", zero_stage=0), "compute"),
        (RecipeSpec(engine="deepspeed", zero_stage=2), "compute"),
        (RecipeSpec(engine="deepspeed", zero_stage=3), "reduce"),
        (RecipeSpec(engine="megatron", zero_stage=1), "compute"),
    ],
    ids=lambda one: one if isinstance(one, str) else f"{one.engine}-{one.zero_stage}",
)
def test_buckets_lie_on_the_stream_that_the_engine_fills_them_on(recipe: RecipeSpec, pool: str):
    assert POOLS[own_pools(recipe).get(Kind.REDUCE, 0)] == pool


def test_initialisation_raises_the_band_to_its_peak_and_no_further():
    moments = (moment("building", Phase.INIT, PARAMETERS=90, TEMPORARY=10), moment("computing", PARAMETERS=9, ACTIVATIONS=1))
    assert sizes_of(moments, DDP).streams == 10
    assert reserved(sizes_of(moments, DDP), DDP) == (100, 100, 100)


@pytest.mark.parametrize("settings", ["default", "expandable_segments"])
@pytest.mark.parametrize("recipe", [DDP, FSDP2, RecipeSpec(engine="deepspeed"), RecipeSpec(engine="megatron", zero_stage=1)])
def test_the_band_is_ordered_starts_at_the_peak_and_has_a_width(recipe: RecipeSpec, settings: str):
    moments = (moment("a", GATHER=500, REDUCE=100), moment("b", GATHER=100, REDUCE=500, LOGITS=200))
    low, expected, high = reserved(sizes_of(moments, recipe), recipe, settings)  # type: ignore[arg-type]
    assert peak(moments).total_bytes == 800 <= low <= expected <= high
    assert high > low
    least, usual, most = under_pressure(sizes_of(moments, recipe), recipe, settings)  # type: ignore[arg-type]
    assert 800 == least <= usual <= most


def test_what_is_expected_is_never_less_than_the_peak():
    shares = Shares(low=0, expected=900, high=0)
    assert (expected_bytes(100, 100, shares), expected_bytes(50, 100, shares)) == (100, 90)
    assert expected_bytes(50, 100, None) == 100


def test_what_megatron_reserves_beyond_its_peak_is_of_what_comes_and_goes():
    """Also on a rank of a pipeline, which has no logits; its stages of the optimizer have the same figures."""
    one, other = (RecipeSpec(engine="megatron", zero_stage=stage) for stage in (0, 1))
    assert shares_of(one, "default") == shares_of(other, "default")
    sizes = Sizes(1000, 1000, {Kind.PARAMETERS: 600, Kind.ACTIVATIONS: 300, Kind.TEMPORARY: 100})
    assert measured_from(sizes, one) == (1000, 500)


@pytest.mark.parametrize("most", [1 << 10, 0], ids=["at once", "one by one"])
def test_many_sums_at_once_are_those_of_each_alone(monkeypatch: pytest.MonkeyPatch, most: int):
    """Ints and columns of several shapes, in groups that share lines; long rows are added up one by one."""
    monkeypatch.setattr(weights, "_LONG", most)
    draw, pools = np.random.default_rng(0), {Kind.GATHER: 1, Kind.REDUCE: 2}
    sizes = [7, 10**12, *(draw.integers(0, 10**12, shape) for shape in ((1, 3), (2, 1), (2, 3)) for _ in range(4))]
    kinds = (Kind.ACTIVATIONS, Kind.GATHER, Kind.REDUCE)
    lines = [Line(kinds[at % 3], size, "") for at, size in enumerate(sizes)]
    groups = [tuple(lines[at] for at in draw.choice(len(lines), number, replace=False)) for number in (0, 1, 5, 9, 14)]
    inside = Inside((str(at), (group,)) for at, group in enumerate(groups[2:4]))
    entries = [
        Entry("start", Phase.INIT, False, (groups[4],)),
        *(Entry("step", Phase.BACKWARD, False, (one, two)) for one, two in pairwise(groups)),
        Entry("block", Phase.BACKWARD, False, (groups[1], groups[3]), inside),
    ]
    found = highest_of(entries, pools)
    moments = [entry.moment(at) for entry in entries for at in range(entry.n_moments)]
    totals = [np.broadcast_to(sum(line.n_bytes for line in one.lines), (2, 3)) for one in moments]
    np.testing.assert_array_equal(found.peak_bytes, np.max(totals, axis=0))
    for pool, highest in enumerate(found.pools):
        held = [sum(line.n_bytes for line in one.lines if pools.get(line.kind, 0) == pool) for one in moments[1:]]
        np.testing.assert_array_equal(
            np.broadcast_to(highest, (2, 3)), np.max([np.broadcast_to(n, (2, 3)) for n in held], axis=0)
        )
