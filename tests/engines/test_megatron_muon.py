"""Holds the placement of Muon's matrices against Megatron-LM's own function, and against a run of its tests."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from math import prod

import pytest

from tests.engines.columns import Columns, assert_is_its_points
from tests.engines.test_megatron import JOBS
from tests.measured import megatron_golden
from zeroplan import estimate, job
from zeroplan.engines.megatron import account
from zeroplan.engines.megatron.muon import balanced, matrices_of, others_of, placed
from zeroplan.engines.megatron.rank import rank_of
from zeroplan.ledger import Kind

#: Qwen3 8B's matrices of a layer, and GPT-2 XL's with one more of an odd size.
QWEN = ((4096, 4096), (6144, 4096), (24576, 4096), (4096, 12288))
GPT2 = ((1600, 1600), (4800, 1600), (6400, 1600), (1600, 6400), (7, 1600))


@pytest.mark.parametrize(
    ("layer", "layers", "ranks", "bucket", "buffer", "fullest"),
    [
        (QWEN, 36, 8, None, 6979321856, 872415232),
        (QWEN, 36, 64, None, 7516192768, 117440512),
        (QWEN, 36, 64, 64_000_000, 13421772800, 201326592),
        (QWEN, 36, 256, 256_000_000, 25769803776, 100663296),
        (QWEN, 5, 16, 10_000_000, 1610612736, 100663296),
        (GPT2, 12, 6, None, 368774400, 61462400),
        (GPT2, 12, 6, 30_000_000, 369043200, 61462400),
        (GPT2, 3, 32, 1_000_000, 327680000, 10240000),
    ],
)
def test_matrices_are_where_megatron_places_them(
    layer: tuple[tuple[int, int], ...], layers: int, ranks: int, bucket: int | None, buffer: int, fullest: int
) -> None:
    """Both numbers are of LayerWiseDistributedOptimizer._compute_per_buffer_param_layout (d98e8a64), called with these shapes."""
    shapes = layer * layers
    assert placed((shapes,), ranks, bucket) == (buffer, sum(map(prod, shapes)), fullest)


def test_buffers_of_a_rank_are_padded_and_its_states_are_those_of_whole_matrices() -> None:
    """On 256 ranks Qwen3 8B has fewer matrices than ranks, so its buffers have the size of its largest matrix for each."""
    asked = {"model": "qwen3-8b", "gpus": 256, "engine": "megatron", "stage": 1}
    adam, muon = (estimate(job(**asked, optimizer=name)) for name in ("adamw", "muon"))
    matrices = 36 * sum(map(prod, QWEN))
    padding = 256 * 24576 * 4096 - matrices
    for kind, width in ((Kind.PARAMETERS, 2), (Kind.GRADIENTS, 4)):
        assert _held(muon, kind) - _held(adam, kind) == width * padding
    others = muon.parameters - matrices
    assert _held(muon, Kind.OPTIMIZER_STATE) == 8 * 24576 * 4096 + 12 * -(-others // 256)


def _held(answer: object, kind: Kind) -> int:
    return sum(int(line.n_bytes) for line in answer.held if line.kind is kind)  # type: ignore[attr-defined]


def test_experts_have_buffers_of_their_own_where_their_ranks_differ() -> None:
    """With ep=4 a rank has two of eight experts; 16 ranks share each."""
    one = job(model="mixtral-8x7b", gpus=64, engine="megatron", stage=1, optimizer="muon", expert_parallel=4)
    rank = rank_of(0, one)
    beside = placed((32 * ((6144, 4096), (4096, 4096), (8, 4096)),), 64, None)
    experts = placed((32 * 2 * ((28672, 4096), (4096, 14336)),), 16, None)
    assert rank.muon is not None
    assert rank.muon.matrices == beside.fullest + experts.fullest
    assert rank.padding == beside.buffer - beside.elements + experts.buffer - experts.elements


def test_the_last_rank_without_a_layout_holds_what_a_run_of_megatron_lm_held() -> None:
    """Megatron-LM's own test logged 870,706,176 bytes between steps, on its last rank of four: 0.2 % more.

    The fullest rank has the embedding's states, and a third more.
    """
    run = next(one for one in megatron_golden.kept() if one.name.endswith("dist_dist_muon_1node"))
    asked = megatron_golden.job_of(run._replace(arguments={}))
    asked = replace(
        asked, recipe=replace(asked.recipe, megatron=replace(asked.recipe.megatron, use_layer_wise_param_layout=False))
    )
    rank, answer = rank_of(0, asked), estimate(asked)
    chunks = [matrices_of(counts, asked, 4, first=True) for counts in rank.each]
    tensors = [(prod(shape), True) for shape in chain(*(beside for beside, _ in chunks))]
    tensors += [(each, False) for each in others_of(rank.each, asked, first=True, last=True)]
    experts = sum(map(prod, chain(*(routed for _, routed in chunks))))
    beside = megatron_golden.held_between_steps(answer) - _held(answer, Kind.OPTIMIZER_STATE)
    ranks = [beside + 8 * (muon + experts) + 12 * adam for muon, adam in balanced(tensors, 4)]
    assert -0.0025 < ranks[-1] / run.held - 1 < 0
    assert max(ranks) > 1.3 * run.held


@pytest.mark.parametrize("overlaps", [False, True])
def test_a_column_of_ranks_equals_its_rows(*, overlaps: bool) -> None:
    one = JOBS["llama by Muon, shared out"]
    recipe = replace(one.recipe, megatron=replace(one.recipe.megatron, overlap_grad_reduce=overlaps))
    points = [(replace(one.mesh, dp_shard=ranks, pp=1), one.batch) for ranks in (1, 4, 64)]
    columns = Columns(points)
    whole = account(one.model, recipe, columns, columns)  # type: ignore[arg-type]  # a mesh and a batch of columns
    assert_is_its_points(whole, [account(one.model, recipe, mesh, batch) for mesh, batch in points])
