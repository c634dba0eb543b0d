"""Checks what Aleph Alpha's program does otherwise than Megatron-Core, by hand."""

from __future__ import annotations

from typing import Any

import pytest

from tests.measured.scaling import as_it_runs, uniform_stages
from zeroplan import JobSpec, job
from zeroplan.estimator import account_of
from zeroplan.steptime import Running, StepTime, step_time

SAID: dict[str, Any] = {
    "model": "llama-3.1-8b", "gpu": "a100-sxm-80gb", "engine": "megatron", "stage": 1, "seq_len": 4096, "gpus": 8,
}  # fmt: skip
PROGRAM = Running("eager", 2, tensor_overlap="none")


def timed(one: JobSpec) -> StepTime:
    account = account_of(one, one.batch)
    return step_time(account, one.model, one.recipe, one.mesh, one.batch, one.cluster, running=PROGRAM)


def both(*, rms_kernel: bool = False, **said: Any) -> tuple[dict[str, float], dict[str, float]]:
    """The parts of a step of Megatron-Core with eager kernels, and of Aleph Alpha's program. [s]"""
    one = job(**SAID, **said)
    usual = timed(one)
    with as_it_runs(rms_kernel=rms_kernel):
        theirs = timed(one)
    return tuple({part.name: float(part.seconds) for part in time.parts} for time in (usual, theirs))  # type: ignore[return-value]


def test_on_one_rank_only_the_largest_logit_is_new() -> None:
    usual, theirs = both(tensor_parallel=1)
    moved = theirs.pop("operators bound by memory") - usual.pop("operators bound by memory")
    assert moved == pytest.approx(4 * 4096 * 128256 / (0.8 * 2.039e12), rel=0.01)
    assert theirs == usual


def test_a_kernel_for_the_norm_spares_its_eager_bytes() -> None:
    _, eager = both(tensor_parallel=1)
    _, kernel = both(tensor_parallel=1, rms_kernel=True)
    spared = eager["operators bound by memory"] - kernel["operators bound by memory"]
    assert spared == pytest.approx((32 * 2 + 1) * (41 + 98 - 4 - 8) * 4096 * 4096 / (0.8 * 2.039e12), rel=0.01)


def test_ranks_sum_an_input_once_more_and_gather_logits() -> None:
    """Of five sums per block four are Megatron-Core's. Seven eighths of all logits, in bf16, arrive at up to 300 GB/s."""
    waits = "waiting for tensor-parallel ranks"
    usual, theirs = both(tensor_parallel=8, sequence_parallel=False)
    logits = 7 / 8 * 2 * 4096 * 128256 / 300e9
    more = theirs[waits] - usual[waits] * 5 / 4
    assert 0.8 * logits < more < 1.6 * logits
    moved = "operators bound by memory"
    whole = 7 / 8 * (23 + 24) + 4 + 8
    assert theirs[moved] - usual[moved] == pytest.approx(whole * 4096 * 128256 / (0.8 * 2.039e12), rel=0.01)


def test_split_sequences_are_not_gathered_again() -> None:
    """Of ten collectives per block eight are left."""
    waits = "waiting for tensor-parallel ranks"
    usual, theirs = both(tensor_parallel=8, sequence_parallel=True)
    logits = 7 / 8 * 2 * 4096 * 128256 / 300e9
    assert 0.76 * usual[waits] < theirs[waits] - logits < 0.84 * usual[waits]


def test_stages_share_out_embedding_norm_and_head_as_layers() -> None:
    assert [sum(uniform_stages(40, stages)) for stages in (2, 3, 4, 8)] == [40] * 4
    assert uniform_stages(40, 2) == [21, 19]
