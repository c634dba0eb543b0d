"""Torch's own pipeline schedules, simulated: ranks take what is estimated, and run passes in the order of the estimate."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import pytest

pytest.importorskip("torch")

import torch

from tests.transformer.tiny_configs import tiny_config
from zeroplan.catalog.config import model_from_config
from zeroplan.comparison import compare_with_estimate
from zeroplan.engines.pipeline.order import interleaved, v_shaped, zero_bubble
from zeroplan.engines.pipeline.schedule import next_stages
from zeroplan.errors import MeasurementError
from zeroplan.measurement import Measurement
from zeroplan.spec.batch import BatchSpec
from zeroplan.spec.family import Family
from zeroplan.spec.job import JobSpec
from zeroplan.spec.mesh import MeshSpec
from zeroplan.spec.model import ModelSpec, MoeSpec
from zeroplan.spec.recipe import RecipeSpec
from zeroplan.verify.release import installed

if TYPE_CHECKING:
    from collections.abc import Mapping

    from zeroplan.spec.recipe import Recompute

pytestmark = pytest.mark.torch
runs = pytest.mark.skipif(installed() == "2.15", reason="torch 2.15 has other schedules, which are refused")

_MODEL = ModelSpec(family="llama", hidden_size=64, intermediate_size=160, num_hidden_layers=6, num_attention_heads=4,
                   num_key_value_heads=2, head_dim=16, vocab_size=256)  # fmt: skip


class Case(NamedTuple):
    """A job on two pipeline ranks of two shards each, and the rank that is run."""

    rank: int
    recipe: dict[str, object]
    micro_batches: int = 3
    seq_len: int = 32
    """With a short sequence gradients outweigh activations, and the peak is where they are reduced."""
    family: Family = "llama"
    model: Mapping[str, object] = MappingProxyType({})
    """Fields that differ from ``_MODEL``."""


_CASES = [
    Case(0, {"zero_stage": 2}, micro_batches=4),
    Case(1, {"zero_stage": 2, "pipeline_schedule": "gpipe", "precision": "fp32"}),
    Case(0, {"zero_stage": 3, "pipeline_schedule": "gpipe", "recompute": "full"}),
    Case(1, {"zero_stage": 3, "precision": "bf16"}),
    Case(0, {"zero_stage": 2, "pipeline_schedule": "interleaved-1f1b", "recompute": "full"}, micro_batches=2),
    Case(1, {"zero_stage": 3, "pipeline_schedule": "interleaved-1f1b"}, micro_batches=2),
    Case(0, {"zero_stage": 2, "pipeline_schedule": "1f1b"}, micro_batches=2, seq_len=2),
    Case(0, {"zero_stage": 3, "pipeline_schedule": "interleaved-1f1b", "precision": "fp32"}, micro_batches=1, seq_len=2),
    Case(
        0,
        {"zero_stage": 3, "pipeline_schedule": "interleaved-1f1b", "pipeline_stages_per_rank": 4},
        model={"num_hidden_layers": 14},
    ),
    Case(
        1,
        {"zero_stage": 2, "pipeline_schedule": "interleaved-1f1b", "pipeline_stages_per_rank": 5, "recompute": "full"},
        seq_len=2,
        model={"num_hidden_layers": 18},
    ),
    Case(0, {"zero_stage": 2, "pipeline_schedule": "interleaved-zero-bubble"}),
    Case(1, {"zero_stage": 2, "pipeline_schedule": "interleaved-zero-bubble", "precision": "bf16"}, micro_batches=4, seq_len=2),
    Case(1, {"zero_stage": 2, "pipeline_schedule": "zbv"}, family="qwen3"),
    Case(0, {"zero_stage": 2, "pipeline_schedule": "zbv"}, micro_batches=1, seq_len=2),
    Case(1, {"zero_stage": 2, "pipeline_schedule": "zbv", "precision": "fp32"}),
    Case(0, {"zero_stage": 2, "pipeline_schedule": "interleaved-zero-bubble", "attention": "eager"}),
    Case(
        1,
        {"zero_stage": 2, "pipeline_schedule": "interleaved-zero-bubble"},
        seq_len=2,
        family="gpt_neox",
        model={"num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True},
    ),
    Case(1, {"zero_stage": 2, "pipeline_schedule": "zbv"}, family="phi3", model={"hidden_act": "gelu"}),
    Case(1, {"zero_stage": 2, "pipeline_schedule": "zbv"}, family="mistral", model={"sliding_window": 16}),
]


_SPLIT = [
    Case(0, {"zero_stage": 2, "pipeline_schedule": "interleaved-1f1b", "recompute": "full"}, micro_batches=2),
    Case(1, {"zero_stage": 3, "pipeline_schedule": "gpipe", "precision": "bf16"}),
    Case(0, {"zero_stage": 3, "recompute": "selective"}, micro_batches=2, seq_len=4),
]


def _job(case: Case, model: ModelSpec = _MODEL, **split: int) -> JobSpec:
    return JobSpec(
        model=replace(model, family=case.family, **case.model), mesh=MeshSpec(**{"pp": 2, "dp_shard": 2, **split}),
        recipe=RecipeSpec(**case.recipe),  # type: ignore[arg-type]
        batch=BatchSpec(micro_batch_size=2, seq_len=case.seq_len, grad_accum_steps=case.micro_batches),
    )  # fmt: skip


def _names(case: Case) -> str:
    family = [] if case.family == "llama" else [case.family]
    return f"rank {case.rank}, {', '.join(map(str, (*family, *case.recipe.values())))}, {case.seq_len} tokens"


@runs
@pytest.mark.parametrize("case", _CASES, ids=_names)
def test_a_rank_takes_what_the_estimate_says(case: Case) -> None:
    """To the byte in every phase, except what the estimate leaves out: rotary frequencies, position ids of one pass, scalars."""
    from tests.simulated import simulate

    torch.set_num_threads(1)
    seen = compare_with_estimate(simulate(_job(case), rank=2 * case.rank))
    for row in (*seen.phases, seen.peak, seen.held):
        assert -_SMALL <= row.difference <= 0, row
    assert all(not row.difference for row in seen.collectives), seen.collectives
    assert {"all_gather", "reduce_scatter", "send"} == {row.what for row in seen.collectives}


@runs
@pytest.mark.parametrize("case", _SPLIT, ids=_names)
def test_a_rank_with_tensor_parallel_stages_takes_what_the_estimate_says(case: Case) -> None:
    """DTensor in every stage. Ranks send their share of the hidden states' sequence; the embedding's gradient is summed whole."""
    from tests.simulated import simulate

    torch.set_num_threads(1)
    seen = compare_with_estimate(simulate(_job(case, tp=2), rank=4 * case.rank))
    for row in (*seen.phases, seen.peak, seen.held):
        assert -_SMALL <= row.difference <= 0, row
    assert all(not row.difference for row in seen.collectives), seen.collectives
    assert {"all_gather", "reduce_scatter", "all_reduce", "send"} == {row.what for row in seen.collectives}


@runs
@pytest.mark.parametrize(("rank", "recompute", "too_high"), [(0, "none", 0), (1, "none", 0), (1, "full", 2)], ids=str)
def test_a_rank_of_sparse_attention_takes_what_the_estimate_says(rank: int, recompute: Recompute, too_high: int) -> None:
    """With recomputation a stage's first layer counts keys that no layer below picked, for each micro-batch."""
    from tests.simulated import simulate

    torch.set_num_threads(1)
    model = replace(model_from_config(tiny_config("glm_moe_dsa")), num_hidden_layers=8)
    job = _job(Case(rank, {"zero_stage": 3, "precision": "bf16-mixed", "recompute": recompute}, micro_batches=2))
    seen = compare_with_estimate(simulate(replace(job, model=model), rank=2 * rank))
    keys = 4 * model.mla.index_topk * 2 * 32  # type: ignore[union-attr]  # of a micro-batch
    for row in (*seen.phases, seen.peak, seen.held):
        assert -_SMALL <= row.difference <= too_high * keys, row
    assert all(not row.difference for row in seen.collectives), seen.collectives


_SHARED = [
    Case(0, {"zero_stage": 2, "recompute": "full", "pipeline_schedule": "interleaved-1f1b"}, micro_batches=2),
    Case(1, {"zero_stage": 3, "recompute": "selective", "precision": "bf16"}, micro_batches=2),
]


@runs
@pytest.mark.parametrize("case", _SHARED, ids=_names)
def test_a_rank_with_context_parallel_stages_takes_what_the_estimate_says(case: Case) -> None:
    """Torch's ring attention in every stage. All sequences of a step are cut at once, with labels already shifted."""
    from tests.simulated import simulate

    torch.set_num_threads(1)
    seen = compare_with_estimate(simulate(_job(case, cp=2), rank=4 * case.rank))
    for row in (*seen.phases, seen.peak, seen.held):
        assert -_SMALL <= row.difference <= 0, row
    assert all(not row.difference for row in seen.collectives), seen.collectives
    assert {"all_gather", "reduce_scatter", "all_to_all", "send"} == {row.what for row in seen.collectives}


_EXPERTS = [
    (2, 0, Case(0, {"zero_stage": 3, "recompute": "full", "pipeline_schedule": "interleaved-1f1b"}, micro_batches=2)),
    (4, 0, Case(1, {"zero_stage": 2}, micro_batches=2, seq_len=2)),
    (2, 2, Case(0, {"zero_stage": 2, "pipeline_schedule": "interleaved-1f1b"}, micro_batches=2)),
]


@runs
@pytest.mark.parametrize(("shards", "dense", "case"), _EXPERTS)
def test_a_rank_with_expert_parallel_stages_takes_what_the_estimate_says(shards: int, dense: int, case: Case) -> None:
    """Transformers' dispatch in every stage. A schedule reduces the gradients of all else before those of the experts.

    If the first layers are ``dense``, the first stage has only dense layers, and the next stage of the same rank has none.
    """
    from tests.simulated import simulate

    torch.set_num_threads(1)
    moe = MoeSpec(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=160, num_dense_layers=dense)
    family: Family = "qwen3_moe" if dense else "mixtral"
    job = _job(case._replace(family=family), replace(_MODEL, family=family, moe=moe), dp_shard=shards, ep=2)
    seen = compare_with_estimate(simulate(job, rank=shards * case.rank))
    for row in (*seen.phases, seen.peak, seen.held):
        assert -_SMALL <= row.difference <= 0, row
    assert all(not row.difference for row in seen.collectives), seen.collectives
    assert {"all_gather", "reduce_scatter", "all_to_all", "send"} == {row.what for row in seen.collectives}


#: Bytes that the estimate leaves out: two tables of 32 bytes per stage, position ids of 32 tokens under two names, losses.
_SMALL = 1200


@pytest.mark.parametrize(("pp", "chunks", "micro_batches"), [(2, 2, 4), (4, 2, 10), (3, 3, 2), (4, 4, 16)])
def test_the_order_of_interleaved_stages_is_torchs(pp: int, chunks: int, micro_batches: int) -> None:
    """So are the stages that are unsharded at each pass."""
    from torch.distributed.pipelining.schedules import ScheduleInterleaved1F1B, _add_unshard_reshard

    torchs = ScheduleInterleaved1F1B.__new__(ScheduleInterleaved1F1B)
    torchs.n_local_stages, torchs.pp_group_size, torchs._n_microbatches = chunks, pp, micro_batches
    torchs.microbatches_per_round = micro_batches // max(1, micro_batches // pp)
    for rank in range(pp):
        order = [action for action in torchs._calculate_single_rank_operations(rank) if action is not None]
        ours = interleaved(rank=rank, pp=pp, chunks=chunks, micro_batches=micro_batches)
        assert [(one.stage_index // pp, one.microbatch_index, one.computation_type.value[:1]) for one in order] == [
            (one.chunk, one.micro_batch, "F" if one.kind == "forward" else "B") for one in ours
        ]
        active, unsharded = set[int](), list[set[int]]()
        for action in _add_unshard_reshard([*order]):
            stage = action.stage_index // pp
            if action.computation_type.value == "UNSHARD":
                active.add(stage)
            elif action.computation_type.value == "RESHARD":
                active.remove(stage)
            else:
                unsharded.append({*active})
        assert unsharded == [set(one) for one in next_stages(ours)]


@pytest.mark.parametrize(("pp", "chunks", "micro_batches"), [(2, 2, 4), (4, 2, 9), (3, 3, 6), (4, 2, 2)])
def test_the_order_of_split_backwards_is_torchs(pp: int, chunks: int, micro_batches: int) -> None:
    from torch.distributed.pipelining.schedules import ScheduleInterleavedZeroBubble, ScheduleZBVZeroBubble

    rounds, v = (
        ScheduleInterleavedZeroBubble.__new__(ScheduleInterleavedZeroBubble),
        ScheduleZBVZeroBubble.__new__(ScheduleZBVZeroBubble),
    )
    for one in (rounds, v):
        one.pp_group_size, one._n_microbatches = pp, micro_batches
    rounds.n_local_stages, rounds.microbatches_per_round = chunks, micro_batches // max(1, micro_batches // pp)
    v.num_stages = 2 * pp
    for rank in range(pp):
        order = [action for action in rounds._calculate_single_rank_operations(rank) if action is not None]
        assert [(one.stage_index // pp, one.microbatch_index, one.computation_type.value) for one in order] == [
            (one.chunk, one.micro_batch, _LETTERS[one.kind])
            for one in zero_bubble(rank=rank, pp=pp, chunks=chunks, micro_batches=micro_batches)
        ]
        order = [action for action in v._calculate_single_rank_operations(rank) if action is not None]
        assert [(int(one.stage_index != rank), one.microbatch_index, one.computation_type.value) for one in order] == [
            (one.chunk, one.micro_batch, _LETTERS[one.kind]) for one in v_shaped(rank=rank, pp=pp, micro_batches=micro_batches)
        ]


_LETTERS = {"forward": "F", "input": "I", "weights": "W"}


@runs
def test_real_ranks_take_and_send_what_the_estimate_says() -> None:
    """Two processes over gloo, with two stages each."""
    from zeroplan.verify.processes.launch import launch
    from zeroplan.verify.task import Task

    job = replace(_job(_CASES[4]), mesh=MeshSpec(pp=2))
    records: list[Measurement] = []
    launch(Task(job=job, transport="gloo", steps=2), keep=records.append, say=lambda _: None)
    assert len(records) == 2
    for record in records:
        seen = compare_with_estimate(record)
        assert all(-_SMALL <= row.difference <= 0 for row in (*seen.phases, seen.peak, seen.held)), seen
        assert [(row.what, row.difference) for row in seen.collectives] == [("send", 0)]


def test_a_users_workload_is_not_split_into_stages() -> None:
    from zeroplan.verify.processes.rank import measure
    from zeroplan.verify.task import Task

    task = Task(job=_job(_CASES[0]), transport="fake", tensors="fake", workload="package.module:function")
    with pytest.raises(MeasurementError, match="cannot be split into pipeline stages"):
        measure(task, rank=0, say=lambda _: None)


def test_schedules_of_another_torch_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.pipelining import schedules

    from zeroplan.verify.training.pipelined import _unanswered

    monkeypatch.delattr(schedules._PipelineSchedule, "_warmup_p2p", raising=False)
    with pytest.raises(MeasurementError, match=r"schedules of torch 2\.11 to 2\.14, and this is .*; install 2\.14"):
        list(_unanswered())
