"""Experts on several ranks: transformers' dispatch and FSDP2 with two meshes, simulated and held against the estimate."""

from __future__ import annotations

import pytest

from tests.expert_jobs import JOBS, expert_job
from zeroplan.comparison import compare_with_estimate
from zeroplan.errors import MeasurementError

torch = pytest.importorskip("torch")
pytest.importorskip("transformers.distributed.expert_parallel")
pytestmark = pytest.mark.torch

#: What no estimate counts: a few numbers per layer and per step (the loss, random states of kernels, counts of tokens).
_NUMBERS = 1_600


@pytest.mark.parametrize("name", JOBS)
def test_estimate_is_what_the_run_takes(name: str) -> None:
    from zeroplan.verify.simulate import simulate

    compared = compare_with_estimate(simulate(JOBS[name]))
    assert abs(compared.peak.difference) < _NUMBERS, compared.peak
    for phase in compared.phases:
        assert abs(phase.difference) < _NUMBERS, phase
    assert not [row for row in compared.collectives if row.difference]


def test_real_tensors_are_refused() -> None:
    from zeroplan.verify.run import run
    from zeroplan.verify.tracker import Tracker

    with pytest.raises(MeasurementError, match="use --backend simulate"):
        run(expert_job(), Tracker(), fake=False)
