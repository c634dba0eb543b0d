"""FSDP2 with CPU offload: which states move to host memory, and the rest. tests/verify compares with the engine."""

from __future__ import annotations

from dataclasses import replace

import pytest

from zeroplan import Estimate, estimate, job
from zeroplan.ledger import Kind
from zeroplan.spec.recipe import Fsdp2Options


def offloaded(**said: object) -> tuple[Estimate, Estimate]:
    asked = job(model="llama-2-7b", gpus=8, stage=3, seq_len=1024, **said)
    away = replace(asked.recipe, fsdp2=Fsdp2Options(cpu_offload=True))
    return estimate(asked), estimate(replace(asked, recipe=away))


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16", "fp32"])
def test_the_states_are_in_host_memory_instead(precision: str):
    here, away = offloaded(precision=precision)
    assert sum(line.n_bytes for line in away.held) == 0
    assert all(line.n_bytes == 0 for line in away.states)
    states = sum(line.n_bytes for line in here.states)
    beside = sum(line.n_bytes for line in away.host if line.kind in (Kind.OPTIMIZER_TEMPORARY, Kind.WORKSPACE))
    assert away.host_bytes == states + beside
    assert here.host_bytes == 0


def test_the_peak_is_lower_by_the_states_that_were_alive():
    here, away = offloaded()
    alive = sum(
        line.n_bytes for line in here.peak.lines if line.kind in (Kind.PARAMETERS, Kind.OPTIMIZER_STATE, Kind.GRADIENTS)
    )
    assert away.peak_bytes == here.peak_bytes - alive


def test_the_optimizer_step_runs_on_the_host_one_tensor_at_a_time():
    here, away = offloaded()
    steps = [moment for answer in (here, away) for moment in answer.moments if moment.name == "optimizer step"]
    assert steps[1].total_bytes == sum(line.n_bytes for line in away.workspaces) < steps[0].total_bytes
    assert any("in turn" in line.reason for line in away.host)


def test_offload_does_not_change_the_collectives():
    here, away = offloaded()
    assert here.traffic.collectives == away.traffic.collectives
