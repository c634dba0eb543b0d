"""Distributed Shampoo against its own code (f606606), which ran once on a CPU and in a fake process group."""

from __future__ import annotations

import numpy as np
import pytest

from tests.engines.columns import Columns, assert_is_its_points
from tests.formulas import assert_explained
from zeroplan import SpecError, estimate, job
from zeroplan.engines import shampoo
from zeroplan.engines.ddp import account, shampoo_blocks
from zeroplan.engines.optimizers import LocalTensor, state_lines, step_temporary_lines
from zeroplan.engines.requests import requests_of
from zeroplan.ledger import Phase, total_bytes
from zeroplan.spec.batch import BatchSpec
from zeroplan.spec.mesh import MeshSpec

_MODEL = ((300, 64), (256, 192), (192, 256), (64,), (300, 64))


@pytest.mark.parametrize(
    ("shapes", "longest", "width", "states", "indices", "peak"),
    [  # bytes held, in cached indices, and allocated in steps two to four; torch's profiler counts a step counter more
        (_MODEL, 128, 4, 2_349_792, 90_608, 2_188_288),
        (_MODEL, 128, 2, 1_802_720, 90_608, 1_094_144),
        (((100,),), 100, 4, 41_200, 40_400, 204_816),
        (((96, 64),), 96, 4, 103_040, 53_888, 188_944),
        (((96, 64),), 96, 2, 78_464, 53_888, 188_944),
        (((96, 64),), 40, 4, 104_448, 10_048, 98_304),
        (((5, 64),), 512, 4, 413_440, 410_880, 2_063_376),  # small sides join
        (((6, 40, 24),), 32, 4, 55_728, 7_080, 92_160),
        (((60, 100), (100, 60)), 100, 4, 206_080, 55_040, 212_136),
        (((60, 100), (100, 60)), 100, 2, 158_080, 55_040, 212_136),
    ],
)
def test_states_and_steps_that_ran_once(
    shapes: tuple[tuple[int, ...], ...], longest: int, width: int, states: int, indices: int, peak: int
) -> None:
    tensors = tuple(map(LocalTensor, shapes))
    elements = sum(int(tensor.numel) for tensor in tensors)
    assert 2 * width * elements + 8 * sum(int(shampoo.triangles(one, longest)) for one in tensors) == states
    assert 8 * int(shampoo.indices(tensors, longest)) == indices
    assert shampoo.highest(tensors, width, longest) == peak


@pytest.mark.parametrize(
    ("ranks", "longest", "held", "buffer", "in_step"),
    [  # DDPDistributedConfig: the fullest rank's states, the buffer, and the most of all ranks in a step; three small linear layers
        (3, 64, 442_184, 296_448, 442_184 + 23_864 + 375_104),
        (4, 512, 531_440, 348_160, 531_440 + 377_840 + 1_814_416),
    ],
)
def test_shares_of_ranks_that_ran_once(ranks: int, longest: int, held: int, buffer: int, in_step: int) -> None:
    shapes = ((300, 64), *((170, 64), (170,)) * 3, (300, 64))
    filtered, factors, indices, sent, temporary = shampoo_blocks.lines(shapes, 4, longest, ranks)
    assert (filtered.n_bytes + factors.n_bytes, sent.n_bytes) == (held, buffer)
    assert held + indices.n_bytes + temporary.n_bytes == in_step
    every_block = sorted(block for shape in shapes for block in shampoo.blocks_of(shape, longest))
    assert sorted(block for mine in shampoo_blocks.assigned(shapes, longest, ranks) for block in mine) == every_block


def test_equal_layers_step_like_layers_listed_one_by_one() -> None:
    of_layer = ((40, 8), (8,), (8, 40))
    once = (LocalTensor((30, 8)), *(LocalTensor(shape, 3) for shape in of_layer), LocalTensor((8,)))
    listed = (LocalTensor((30, 8)), *map(LocalTensor, of_layer * 3), LocalTensor((8,)))
    for longest in (4, 16, 64):
        for width in (2, 4):
            assert shampoo.highest(once, width, longest) == shampoo.highest(listed, width, longest)


def test_columns_are_their_points() -> None:
    rows = np.array([[300, 150, 100, 150]])
    sizes = ((rows, 64), (rows // 2, 8))
    lines = [
        make("shampoo-1024", "forloop", [LocalTensor(shape) for shape in sizes], 4)
        for make in (state_lines, step_temporary_lines)
    ]
    for at in range(4):
        tensors = [LocalTensor((int(height[0, at]), width)) for height, width in sizes]
        for column, make in zip(lines, (state_lines, step_temporary_lines), strict=True):
            assert [np.broadcast_to(line.n_bytes, (1, 4))[0, at] for line in column] == [
                line.n_bytes for line in make("shampoo-1024", "forloop", tensors, 4)
            ]


@pytest.mark.parametrize("optimizer", ["shampoo", "shampoo-1024"])
def test_ranks_share_the_blocks_at_stage_1(optimizer: str) -> None:
    asked = {"model": "smollm2-135m", "seq_len": 64, "optimizer": optimizer}
    shared = estimate(job(**asked, gpus=4, stage=1))  # type: ignore[arg-type]
    assert_explained(shared)
    alone = estimate(job(**asked, gpus=4, stage=0))  # type: ignore[arg-type]
    assert total_bytes(shared.states) < total_bytes(alone.states)
    assert [one.operation for one in shared.traffic.collectives if one.phase is Phase.STEP] == ["all_gather"]
    points = [(MeshSpec(dp_shard=ranks), BatchSpec(seq_len=64)) for ranks in (1, 2, 3, 8)]
    one, columns = job(**asked, gpus=2, stage=1), Columns(points)  # type: ignore[arg-type]
    whole = account(one.model, one.recipe, columns, columns)  # type: ignore[arg-type]
    assert_is_its_points(whole, [account(one.model, one.recipe, *point) for point in points])


def test_a_replay_is_refused() -> None:
    with pytest.raises(SpecError, match="the requests of Shampoo cannot be written out"):
        requests_of(job(model="smollm2-135m", gpus=1, optimizer="shampoo", seq_len=64))
