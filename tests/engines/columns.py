"""Several meshes and batches as one, the form that formulas take: a field that differs between them is a column of integers."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING

import numpy as np

from zeroplan.ledger import Phase

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zeroplan.engines.account import Account
    from zeroplan.spec.batch import BatchSpec
    from zeroplan.spec.mesh import MeshSpec


class Columns:
    """The fields of a mesh and a batch. A number that is the same in all points is a plain integer."""

    def __init__(self, points: Sequence[tuple[MeshSpec, BatchSpec]]) -> None:
        for specs in zip(*points, strict=True):
            for field in fields(specs[0]):
                numbers = [getattr(spec, field.name) for spec in specs]
                same = len(set(numbers)) == 1
                setattr(self, field.name, numbers[0] if same else np.array(numbers, dtype=np.int64))


def assert_is_its_points(whole: Account, points: Sequence[Account]) -> None:
    """Assert that each place of a column has the moments of its point, in the same order and with the same bytes.

    A column may have more moments, if other places allocate something there. They must not exceed the point's peak of that phase;
    a first micro-batch, which only a point whose peak it is has, must not exceed the point's peak.
    """
    for at, point in enumerate(points):
        rest = iter(point.moments)
        moment = next(rest)
        for column in whole.moments:
            n_bytes = np.broadcast_to(column.total_bytes, len(points))[at]
            if moment is not None and column.name == moment.name and n_bytes == moment.total_bytes:
                moment = next(rest, None)
            else:
                assert n_bytes <= _highest(point, column.phase), (at, column.name)
        assert moment is None, (at, f"the column lacks {moment.name}")
        for sent, call in zip(whole.collectives, point.collectives, strict=True):
            assert np.broadcast_to(sent.sent_bytes, len(points))[at] == call.sent_bytes, (at, call)


def _highest(point: Account, phase: Phase) -> int:
    phases = (phase,) if phase is not Phase.FIRST else [other for other in Phase if other is not Phase.INIT]
    return max((int(moment.total_bytes) for moment in point.moments if moment.phase in phases), default=0)
