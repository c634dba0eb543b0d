"""A dry run counts one communicator for each group size of a step's collectives: tensor-parallel scripts use several groups."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from zeroplan.engines.device import outside_beside
from zeroplan.report.dryrun import outside


@pytest.mark.parametrize(
    ("gpus", "sizes", "groups"), [(1, (), 0), (8, (), 1), (8, (8, 8), 1), (8, (2, 4, 4, 1), 2), (64, (8, 2, 4), 3)]
)
def test_each_group_size_has_a_communicator(gpus: int, sizes: tuple[int, ...], groups: int):
    sent = [SimpleNamespace(group=size) for size in sizes]
    found = SimpleNamespace(gpus=gpus, gpu="h100-sxm-80gb", collectives=sent, outside_buffers=())
    assert outside(found) == outside_beside(groups, "h100-sxm-80gb")
