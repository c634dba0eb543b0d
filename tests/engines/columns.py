"""Several meshes and batches at once, as formulas take them: what differs between them is a column of integers."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zeroplan.spec.batch import BatchSpec
    from zeroplan.spec.mesh import MeshSpec


class Columns:
    """A mesh and a batch in one; a number that all points have is a plain integer."""

    def __init__(self, points: Sequence[tuple[MeshSpec, BatchSpec]]) -> None:
        for specs in zip(*points, strict=True):
            for field in fields(specs[0]):
                numbers = [getattr(spec, field.name) for spec in specs]
                same = len(set(numbers)) == 1
                setattr(self, field.name, numbers[0] if same else np.array(numbers, dtype=np.int64))
