"""Predicted requests of a step: compared with the estimate, replayed through the allocator, and written to files."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import pytest

from tests.answers.jobs import kept
from tests.combined import every_case
from zeroplan import SpecError, estimate
from zeroplan.engines.deepspeed.stage3.step import groups_of
from zeroplan.engines.pipeline import accounts
from zeroplan.engines.pipeline.traffic import SEND
from zeroplan.engines.requests import STEPS, deepspeed_stage3, not_written, program_of, requests_of
from zeroplan.engines.requests.log import Log
from zeroplan.engines.rows import trained_row
from zeroplan.estimator import REPLAYED_MICRO_BATCHES
from zeroplan.ledger import Among, Collective, Kind, Phase, total_bytes
from zeroplan.replay import StepReplay, trace_of
from zeroplan.resolve import job
from zeroplan.saved_runs.perfetto import save_events
from zeroplan.saved_runs.snapshot import save_requests
from zeroplan.snapshots.reading import read_snapshot
from zeroplan.spec.hardware import SETTINGS, AllocatorSettings
from zeroplan.spec.recipe import DdpOptions, DeepSpeedOptions, Fsdp1Options, Fsdp2Options
from zeroplan.units import GIB, MIB

if TYPE_CHECKING:
    from pathlib import Path

    from zeroplan.engines.account import Account
    from zeroplan.spec.job import JobSpec
    from zeroplan.spec.recipe import Recompute

_LLAMA = {"model": "llama-2-7b"}
_NO_SYNC = {"sync_every_micro_batch": False}
_SMALL_BUCKETS = DeepSpeedOptions(offload_optimizer="cpu", reduce_bucket_size=20_000_000)
_MIXTRAL = {"model": "mixtral-8x7b", "expert_parallel": 2, "gpus": 32}
_AWAY: dict[str, Any] = {"offload_optimizer": "cpu", "offload_param": "cpu"}
_LITTLE_AT_ONCE = DeepSpeedOptions(
    contiguous_gradients=False, stage3_prefetch_bucket_size=1_000_000, stage3_max_live_parameters=10_000_000,
    stage3_max_reuse_distance=0, reduce_bucket_size=20_000_000,
)  # fmt: skip
_QUANTIZED = DeepSpeedOptions(
    zero_quantized_weights=True, zero_quantized_gradients=True, grad_accum_dtype="fp32", reduce_bucket_size=20_000_000,
)  # fmt: skip
_TINY_LLAMA = {"engine": "deepspeed", "stage": 3, "model": "llama-3.2-1b"}
_STAGE_3: tuple[dict[str, object], ...] = (
    {"engine": "deepspeed", "stage": 3, "recompute": "full", "grad_accum": 2},
    {"engine": "deepspeed", "stage": 3, "deepspeed": _LITTLE_AT_ONCE, "grad_accum": 2},
    {"engine": "deepspeed", "stage": 3, "deepspeed": DeepSpeedOptions(reduce_scatter=False, grad_accum_dtype="fp32")},
    {"engine": "deepspeed", "stage": 3, "deepspeed": DeepSpeedOptions(zero_hpz_partition_size=2), "grad_accum": 2},
    {"engine": "deepspeed", "stage": 3, "deepspeed": DeepSpeedOptions(stage3_allgather_sequential=True)},
    {"engine": "deepspeed", "stage": 3, "deepspeed": DeepSpeedOptions(memory_efficient_linear=False), "optimizer": "adagrad"},
    {"engine": "deepspeed", "stage": 3, "deepspeed": DeepSpeedOptions(**_AWAY), "grad_accum": 2},
    {**_TINY_LLAMA, "deepspeed": _QUANTIZED, "gpus": 16, "grad_accum": 2},
    {"engine": "deepspeed", "stage": 3, "model": "bloom-560m", "recompute": "full"},
    {**_TINY_LLAMA, "deepspeed": DeepSpeedOptions(**_AWAY), "gpus": 1, "lora_rank": 8},
    {**_TINY_LLAMA, "lora_rank": 8, "quantize": "nf4", "recompute": "full"},
    {**_TINY_LLAMA, "freeze": "embedding,head", "freeze_layers": 3},
)
_JOBS = (
    {"engine": "fsdp2", "stage": 3},
    {"engine": "fsdp2", "stage": 2, "recompute": "full", "grad_accum": 3},
    {"engine": "fsdp2", "stage": 3, "loss": "chunked"},
    {"engine": "fsdp2", "stage": 3, "loss": "log-probs", "micro_batch": 3},
    {"engine": "deepspeed", "stage": 2, "loss": "log-probs"},
    {"engine": "fsdp2", "stage": 3, "model": "llama-3.1-8b", "fsdp2": Fsdp2Options(modules="torchtitan"), "grad_accum": 2},
    {"engine": "fsdp2", "stage": 3, "model": "llama-2-7b", "fsdp2": Fsdp2Options(ends_apart=True), "recompute": "selective"},
    {"engine": "fsdp2", "stage": 3, **_LLAMA, "lora_rank": 8},
    {"engine": "fsdp2", "stage": 2, **_LLAMA, "freeze": "embedding,head", "freeze_layers": 3, "recompute": "full"},
    {"engine": "fsdp2", "stage": 3, **_LLAMA, "freeze_layers": 3, "fsdp2": Fsdp2Options(ends_apart=True)},
    {"engine": "fsdp2", "stage": 3, **_LLAMA, "tensor_parallel": 2, "micro_batch": 2},
    {"engine": "fsdp2", "stage": 2, **_LLAMA, "tensor_parallel": 2, "context_parallel": 2, "recompute": "selective"},
    {"engine": "fsdp2", "stage": 3, **_LLAMA, "context_parallel": 2, "fsdp2": Fsdp2Options(ends_apart=True)},
    {"engine": "fsdp2", "stage": 2, "model": "mixtral-8x7b", "expert_parallel": 2, "recompute": "full"},
    {"engine": "fsdp2", "stage": 2, "model": "qwen3-30b-a3b", "expert_parallel": 4, "gpus": 8, "grad_accum": 2},
    {"engine": "fsdp2", "stage": 3, **_MIXTRAL},
    {"engine": "fsdp2", "stage": 3, **_LLAMA, "fsdp2": Fsdp2Options(cpu_offload=True), "grad_accum": 2},
    {"engine": "fsdp2", "stage": 3, **_LLAMA, "fsdp2": Fsdp2Options(cpu_offload=True), "gpus": 1, "lora_rank": 8},
    {"engine": "fsdp2", "stage": 3, **_LLAMA, "fsdp2": Fsdp2Options(reshard_after_forward=2), "recompute": "full"},
    {"engine": "fsdp2", "stage": 3, **_LLAMA, "fsdp2": Fsdp2Options(reshard_after_forward=2, ends_apart=True)},
    {"engine": "fsdp2", "stage": 3, **_LLAMA, "lora_rank": 8, "quantize": "nf4", "recompute": "full"},
    {"engine": "ddp", "stage": 0, "model": "qwen2.5-7b", "lora_rank": 8, "quantize": "nf4-double"},
    {"engine": "deepspeed", "stage": 2, **_LLAMA, "lora_rank": 8, "quantize": "nf4-double"},
    {"engine": "fsdp2", "stage": 3, **_LLAMA, "fsdp2": Fsdp2Options(torch="2.15", ends_apart=True)},
    {"engine": "fsdp2", "stage": 3, **_LLAMA, "fsdp2": Fsdp2Options(keeps_last=True, forward_prefetch=1, backward_prefetch=2)},
    {"engine": "fsdp2", "stage": 3, **_LLAMA, "fsdp2": Fsdp2Options(keeps_last=True, backward_prefetch=3), "recompute": "full"},
    {"engine": "fsdp2", "stage": 3, **_LLAMA, "fsdp2": Fsdp2Options(forward_prefetch=2, ends_apart=True), "lora_rank": 8},
    {"engine": "fsdp2", "stage": 3, **_MIXTRAL, "fsdp2": Fsdp2Options(torch="2.15"), "grad_accum": 2},
    {"engine": "fsdp2", "stage": 3, **_LLAMA, "recompute": "full", "offload_activations": True, "lora_rank": 8},
    {"engine": "ddp", "stage": 0, **_LLAMA, "loss": "fused", "grad_accum": 2, "optimizer": "sgd"},
    {"engine": "ddp", "stage": 0, **_LLAMA, "loss": "fused", "freeze": "norm"},
    {"engine": "ddp", "stage": 0, **_LLAMA, "loss": "chunked", "grad_accum": 2, "optimizer": "sgd", "recompute": "full"},
    {"engine": "fsdp1", "stage": 3},
    {"engine": "fsdp1", "stage": 3, **_LLAMA, "fsdp1": Fsdp1Options(backward_prefetch="backward_post"), "recompute": "full"},
    {"engine": "fsdp1", "stage": 2, **_LLAMA, "fsdp1": Fsdp1Options(use_orig_params=False), "grad_accum": 3, **_NO_SYNC},
    {"engine": "fsdp1", "stage": 3, **_LLAMA, "fsdp1": Fsdp1Options(forward_prefetch=True), "grad_accum": 3},
    {"engine": "fsdp1", "stage": 3, "fsdp1": Fsdp1Options(use_orig_params=False), "grad_accum": 3, **_NO_SYNC, "gpus": 3},
    {"engine": "fsdp1", "stage": 2, "fsdp1": Fsdp1Options(forward_prefetch=True), "grad_accum": 3, **_NO_SYNC, "seq_len": 64},
    {"engine": "fsdp1", "stage": 3, "replicas": 2, "fsdp1": Fsdp1Options(reduce_dtype="fp32"), "grad_accum": 2},
    {"engine": "fsdp1", "stage": 3, "model": "qwen3-30b-a3b", "fsdp1": Fsdp1Options(backward_prefetch="no_prefetch")},
    {"engine": "fsdp1", "stage": 2, "precision": "fp32", "recompute": "selective", "optimizer": "adagrad"},
    {"engine": "fsdp1", "stage": 3, **_LLAMA, "recompute": "full", "offload_activations": True, "keep_logits": True},
    {"engine": "ddp", "stage": 0},
    {"engine": "ddp", "stage": 1, **_LLAMA, "lora_rank": 8, "grad_accum": 2},
    {"engine": "ddp", "stage": 0, **_LLAMA, "freeze": "embedding", "freeze_layers": 3},
    {"engine": "deepspeed", "stage": 0, **_LLAMA, "lora_rank": 8},
    {"engine": "deepspeed", "stage": 1, **_LLAMA, "freeze": "embedding,norm", "recompute": "full"},
    {"engine": "deepspeed", "stage": 2, **_LLAMA, "lora_rank": 8, "recompute": "selective"},
    {"engine": "ddp", "stage": 0, "ddp": DdpOptions(find_unused_parameters=True), "micro_batch": 8},
    {"engine": "ddp", "stage": 0, "ddp": DdpOptions(static_graph=True), "recompute": "full", "offload_activations": True},
    {"engine": "fsdp2", "stage": 3, **_LLAMA, "recompute": "selective", "offload_activations": True},
    {"engine": "fsdp2", "stage": 3, **_LLAMA, "offload_activations": True},
    {"engine": "ddp", "stage": 0, **_LLAMA, "offload_activations": True},
    {"engine": "ddp", "stage": 0, **_LLAMA, "offload_activations": True, "lora_rank": 8},
    {"engine": "fsdp2", "stage": 2, **_LLAMA, "offload_activations": True, "freeze": "embedding", "freeze_layers": 3},
    {"engine": "fsdp2", "stage": 3, "model": "mixtral-8x7b", "offload_activations": True},
    {"engine": "fsdp1", "stage": 2, **_LLAMA, "offload_activations": True},
    {"engine": "deepspeed", "stage": 2, **_LLAMA, "offload_activations": True},
    {"engine": "deepspeed", "stage": 1, "recompute": "full", "offload_activations": True, "grad_accum": 2},
    {"engine": "deepspeed", "stage": 0},
    {"engine": "deepspeed", "stage": 1, "grad_accum": 2},
    {"engine": "deepspeed", "stage": 1, "deepspeed": DeepSpeedOptions(grad_accum_dtype="fp32"), "grad_accum": 2},
    {"engine": "deepspeed", "stage": 1, "deepspeed": DeepSpeedOptions(offload_optimizer="cpu"), "grad_accum": 2},
    {"engine": "deepspeed", "stage": 2, **_LLAMA, "deepspeed": _SMALL_BUCKETS, "grad_accum": 2},
    {"engine": "deepspeed", "stage": 2, "recompute": "selective"},
    {"engine": "deepspeed", "stage": 1, "model": "opt-1.3b", "grad_accum": 2},
    {"engine": "deepspeed", "stage": 2, "loss": "fused"},
    {"engine": "fsdp2", "stage": 3, "loss": "fused", "grad_accum": 2},
    {"engine": "ddp", "stage": 0, **_LLAMA, "loss": "fused", "recompute": "full"},
    {"engine": "ddp", "stage": 0, "model": "bloom-560m", "recompute": "selective"},
    {"engine": "fsdp2", "stage": 3, "model": "olmo-2-7b"},
    {"engine": "fsdp2", "stage": 3, "model": "olmo-2-7b", "recompute": "full"},
    {"engine": "fsdp2", "stage": 3, "loss": "fused"},
    {
        "engine": "fsdp2",
        "stage": 3,
        "model": "gpt2",
        "keep_logits": True,
        "grad_accum": 3,
        "sync_every_micro_batch": False,
        "recompute": "full",
        "optimizer": "sgd",
        "seq_len": 64,
    },
    {"engine": "fsdp2", "stage": 2, "model": "bloom-560m", "recompute": "full"},
    {"engine": "fsdp2", "stage": 3, "model": "olmo-2-1124-7b", "recompute": "full"},
    {"engine": "ddp", "stage": 0, "model": "opt-1.3b"},
    {"engine": "deepspeed", "stage": 1, "model": "opt-1.3b"},
    {"engine": "fsdp2", "stage": 3, "optimizer": "muon"},
    {"engine": "ddp", "stage": 0, "optimizer": "adamw-8bit"},
    {"engine": "deepspeed", "stage": 2, "optimizer": "adamw-8bit"},
    *_STAGE_3,
)


def _job(**more: object) -> JobSpec:
    return job(**{"model": "gpt2", "gpus": 4, "seq_len": 256, **more})  # type: ignore[arg-type]


@lru_cache(maxsize=4)
def _steps_of(one: JobSpec, steps: int) -> Log:
    """The requests of this many steps, cached for several tests of a job."""
    return requests_of(one, steps)


_Sent = Counter[tuple[str, Among, int]]
"""The payload of each kind of collective in each group of ranks. [bytes]"""


def _ranks_of(operation: str, ranks: int) -> int:
    """The ranks of a collective: a send has two, although the traffic lists those of all stages."""
    return 2 if operation == SEND else ranks


def _sent_in_last(fewer: Log, more: Log) -> _Sent:
    """The payload of the last step, which ``more`` has and ``fewer`` lacks."""
    found = _Sent()
    for call in more.calls[len(fewer.calls) :]:
        found[call.operation, call.among, call.ranks] += call.n_bytes
    return found


def _sent_as_estimated(collectives: tuple[Collective, ...]) -> _Sent:
    """The payload in an estimate's traffic."""
    found = _Sent()
    for call in collectives:
        if int(call.group) > 1 and call.payload_bytes:
            found[call.operation, call.among, _ranks_of(call.operation, int(call.group))] += int(call.payload_bytes)
    return found


def _live(log: Log) -> list[int]:
    """Bytes alive after each request and release."""
    return list(accumulate(log.requests[one].n_bytes if one >= 0 else -log.requests[-1 - one].n_bytes for one in log.events))


@pytest.mark.parametrize(("engine", "stage"), [("ddp", 0), ("deepspeed", 1), ("deepspeed", 3), ("fsdp2", 3)])
def test_four_micro_batches_reserve_what_eight_do(engine: str, stage: int):
    """So a verdict by replay needs only four micro-batches."""
    few, many = (
        StepReplay(job(model="gpt2", engine=engine, stage=stage, gpus=4, seq_len=512, grad_accum=number))
        for number in (REPLAYED_MICRO_BATCHES, 2 * REPLAYED_MICRO_BATCHES)
    )
    assert all(few.replayed(settings) == many.replayed(settings) for settings in SETTINGS)


@pytest.mark.parametrize(
    "choices",
    _JOBS,
    ids=lambda one: "-".join(str(value) for value in one.values() if isinstance(value, str | int)),
    scope="class",
)
class TestOfAStep:
    """Properties of every engine's requests."""

    def test_its_peak_is_the_estimates(self, choices: dict[str, object]):
        """The requests' peak plus cuBLAS's workspaces equals the estimate's, to the byte."""
        one = _job(**choices)
        answer, log = estimate(one), _steps_of(one, STEPS[one.recipe.engine])
        in_steps = max(int(moment.total_bytes) for moment in answer.moments if moment.phase is not Phase.INIT)
        last = next(span.start for span in log.spans if span.step == log.spans[-1].step)
        assert max(_live(log)[last:]) + total_bytes(answer.workspaces) == in_steps

    def test_a_step_sends_what_the_estimate_says(self, choices: dict[str, object]):
        """The payload of every kind of collective in every group of ranks."""
        one = _job(**choices)
        steps = STEPS[one.recipe.engine]
        sent = _sent_in_last(_steps_of(one, steps), _steps_of(one, steps + 1))
        assert sent == _sent_as_estimated(estimate(one).traffic.collectives)

    def test_a_further_step_is_like_the_last(self, choices: dict[str, object]):
        """A further step ends with as much memory as the one before, and releases only requested blocks."""
        one = _job(**choices)
        steps = STEPS[one.recipe.engine]
        ends = [_live(_steps_of(one, number)) for number in (steps, steps + 1)]
        assert ends[0][-1] == ends[1][-1]
        assert min(ends[1]) >= 0
        trace_of(_steps_of(one, steps))  # checks itself

    def test_what_is_kept_is_the_estimates_states(self, choices: dict[str, object]):
        """Weights and optimizer state, to the byte."""
        one = _job(**choices)
        answer, log = estimate(one), _steps_of(one, STEPS[one.recipe.engine])
        held = set(range(len(log.requests))) - {-1 - event for event in log.events if event < 0}
        for kind in (Kind.PARAMETERS, Kind.OPTIMIZER_STATE):
            n_bytes = sum(log.requests[place].n_bytes for place in held if log.requests[place].kind is kind)
            assert n_bytes == answer.states_by_kind[kind]


_ON_HOST = Fsdp2Options(cpu_offload=True)
_PIPELINES: tuple[dict[str, object], ...] = (
    {"pipeline_schedule": "gpipe", "recompute": "full"},
    {"pipeline_schedule": "1f1b", "pipeline_parallel": 4},
    {"pipeline_schedule": "interleaved-1f1b", "stage": 2},
    {"pipeline_schedule": "interleaved-1f1b", "pipeline_stages_per_rank": 4},
    {"pipeline_schedule": "interleaved-zero-bubble", "stage": 2, "precision": "bf16"},
    {"pipeline_schedule": "zbv", "stage": 2},
    {"pipeline_schedule": "interleaved-1f1b", "offload_activations": True, "recompute": "full", "fsdp2": _ON_HOST},
    {"fsdp2": Fsdp2Options(ends_apart=True, torch="2.15")},
    {"tensor_parallel": 2, "micro_batch": 2},
    {"context_parallel": 2},
    {"loss": "chunked"},
    {"model": "mixtral-8x7b", "expert_parallel": 2, "pipeline_schedule": "gpipe"},
    {"lora_rank": 8, "precision": "bf16", "replicas": 2},
)  # fmt: skip


@pytest.mark.parametrize("choices", _PIPELINES, ids=lambda one: "-".join(str(value) for value in one.values()))
class TestOfAPipeline:
    """Properties of the requests of every pipeline rank."""

    @staticmethod
    def _ranks(choices: dict[str, object]) -> tuple[JobSpec, tuple[Account, ...]]:
        given = {"model": "llama-3.2-1b", "gpus": 16, "pipeline_parallel": 2, "grad_accum": 4, "stage": 3, **choices}
        one = _job(**given)
        return one, accounts(one.model, one.recipe, one.mesh, one.batch)

    def test_its_peak_is_the_estimates(self, choices: dict[str, object]):
        """To the byte."""
        one, every = self._ranks(choices)
        for rank, account in enumerate(every):
            log = requests_of(one, pipeline_rank=rank)
            last = next(span.start for span in log.spans if span.step == log.spans[-1].step)
            assert max(_live(log)[last:]) == account.pipeline[0].peak_bytes

    def test_a_step_sends_what_the_estimate_says_and_is_like_the_last(self, choices: dict[str, object]):
        """Collectives of shards and of ranks that split a stage, and sends of hidden states and gradients between stages."""
        one, every = self._ranks(choices)
        for rank, account in enumerate(every):
            fewer, more = (requests_of(one, steps, pipeline_rank=rank) for steps in (2, 3))
            assert _sent_in_last(fewer, more) == _sent_as_estimated(account.collectives)
            assert _live(fewer)[-1] == _live(more)[-1]
            trace_of(more)  # checks itself


def test_a_pipeline_reduces_a_blocks_experts_after_its_other_parameters():
    """``perform_reduce_grad`` (torch 2.13) goes through a block's parameter groups in order. Hooks of a backward run in reverse."""
    one = _job(model="mixtral-8x7b", gpus=16, stage=3, pipeline_parallel=2, expert_parallel=2, grad_accum=2)
    one = replace(one, model=replace(one.model, num_hidden_layers=4))
    calls = requests_of(one, 1, pipeline_rank=1).calls
    block = [Among.SHARDS, Among.SHARDS_OF_EXPERTS]
    assert [call.among for call in calls if call.operation == "reduce_scatter"] == [Among.SHARDS, *block, *block]


def test_of_a_pipeline_the_rank_that_is_asked_for_is_replayed():
    """Without a requested rank, the fullest is replayed, like the estimate's."""
    one = _job(model="llama-3.2-1b", gpus=4, stage=3, pipeline_parallel=2, grad_accum=2)
    for rank in (None, 0, 1):
        answer = estimate(one, pipeline_rank=rank, replay=True)
        assert answer.replay is not None
        shown = answer.replay.replayed()
        assert shown.allocated_bytes == pytest.approx(answer.peak_bytes, rel=1e-3)  # blocks may be larger than requested
        assert answer.reserved.expected_bytes == shown.reserved_bytes


def _peaks(one: JobSpec) -> tuple[int, int]:
    """The last step's peak by requests and by the estimate, both without cuBLAS's workspaces. [bytes]"""
    answer, log = estimate(one), requests_of(one)
    last = next(span.start for span in log.spans if span.step == log.spans[-1].step)
    in_steps = max(int(moment.total_bytes) for moment in answer.moments if moment.phase not in (Phase.INIT, Phase.FIRST))
    return max(_live(log)[last:]), in_steps - total_bytes(answer.workspaces)


def test_a_bias_reaches_the_bucket_before_a_weight_that_is_larger_than_it():
    """The peak depends on this order. The estimate's order is that of DeepSpeed's own runs."""
    options = DeepSpeedOptions(reduce_bucket_size=2_000_000)  # a matrix of the MLP has 2,359,296 elements
    one = _job(engine="deepspeed", stage=2, gpus=512, seq_len=16, deepspeed=options)
    requested, expected = _peaks(replace(one, model=replace(one.model, vocab_size=64, num_hidden_layers=3)))
    assert requested == expected


#: Engines and stages whose requests peak exactly at the estimate. Others pad single tensors where the estimate pads their sum, and
#: at DeepSpeed's stage 3 one saved job of Mixtral differs by 0.1 %.
_EXACT = {("ddp", 0), ("deepspeed", 0), ("deepspeed", 1), ("deepspeed", 2), ("fsdp2", 2)}
_NEAR = 0.0015


def test_saved_jobs_peak_by_their_requests_as_by_the_estimate():
    """All saved jobs whose requests are known, except pipelines; by day every 60th."""
    known = [each for each in kept() if not not_written(each.job) and each.job.mesh.pp == 1]
    for each in known if every_case() else known[::60]:
        requested, expected = _peaks(each.job)
        recipe = each.job.recipe
        near = 0 if (recipe.engine, recipe.zero_stage) in _EXACT else _NEAR
        assert requested == pytest.approx(expected, rel=near, abs=0), each.words


@pytest.mark.parametrize(("engine", "stage"), [("fsdp1", 3), ("fsdp2", 3), ("ddp", 0), ("deepspeed", 2), ("deepspeed", 3)])
def test_layers_of_full_attention_request_what_their_own_heads_need(engine: str, stage: int):
    """FSDP1's own code on fake tensors peaks at the estimate, too, within 2 KB of 41 GB in twelve layers of the 12B."""
    one = _job(model="gemma-4-12b", engine=engine, stage=stage, seq_len=4096)
    requested, expected = _peaks(replace(one, model=replace(one.model, num_hidden_layers=12)))
    assert requested == pytest.approx(expected, rel=0 if (engine, stage) in _EXACT else _NEAR, abs=0)


def test_every_sub_group_has_a_step_counter():
    """Each counter has four bytes; the estimate counts one for all sub-groups."""
    one = _job(engine="deepspeed", stage=3, deepspeed=DeepSpeedOptions(sub_group_size=10_000_000))
    groups = groups_of(trained_row(one.model), 10_000_000, 4)
    requested, estimated = _peaks(one)
    assert len(groups) > 2
    assert requested == estimated + 4 * (len(groups) - 1)


@pytest.mark.parametrize("model", ["mixtral-8x7b", "qwen3-30b-a3b", "gpt-oss-20b", "deepseek-v3"])
def test_experts_are_gathered_as_the_estimate_says(model: str):
    """Small differences: a residual gradient when a bucket is reduced, and the order of waiting for experts."""
    one = _job(model=model, engine="deepspeed", stage=3)
    one = replace(one, model=replace(one.model, num_hidden_layers=4))
    requested, estimated = _peaks(one)
    assert requested == pytest.approx(estimated, rel=1e-4)


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize(
    "model",
    ["gpt2", "opt-1.3b", "bloom-560m", "pythia-1b", "llama-3.2-1b", "gemma-2-2b", "gemma-3-1b", "phi-4", "glm-4-9b",
     "olmo-2-1124-7b", "granite-3.0-2b", "mixtral-8x7b", "gpt-oss-20b", "deepseek-v3", "llama-4-scout", "apertus-8b",
     "gemma-4-12b"],
)  # fmt: skip
def test_every_module_of_a_family_begins_where_deepspeeds_coordinator_expects_it(model: str, recompute: str):
    """The block's program and the coordinator have the same modules in the same order, and every gradient has an owner."""
    one = _job(model=model, engine="deepspeed", stage=3, recompute=recompute)
    layers = 6 if model == "gemma-4-12b" else 4  # whole periods
    step = deepspeed_stage3.Step(replace(one, model=replace(one.model, num_hidden_layers=layers)), Log())
    for _ in step.micro_batches(2):
        assert step.at == len(step.gathers.steps)
        assert not any(step.waiting.values())
        assert not step.returning


def test_on_a_card_that_is_too_small_it_says_where_and_on_a_smaller_one_it_tries_again():
    """With less room than the reserved memory the allocator frees cached blocks; below the peak it runs out."""
    step = StepReplay(_job(stage=3))
    shown = step.replayed()
    ample = step.on_card(shown.reserved_bytes)
    assert ample.fits
    assert not ample.retries
    less = step.on_card(shown.reserved_bytes - 2 * MIB)
    assert less.retries or not less.fits
    none = step.on_card(shown.allocated_bytes // 2)
    assert not none.fits
    assert none.phase is not None


@pytest.mark.parametrize(("engine", "stage"), [("ddp", 0), ("deepspeed", 1), ("deepspeed", 3), ("fsdp1", 3), ("fsdp2", 3)])
def test_the_first_micro_batch_alone_runs_out_where_all_steps_do(engine: str, stage: int):
    asked = job(model="gpt2", gpus=8, engine=engine, stage=stage, seq_len=512, grad_accum=2)
    whole, first = StepReplay(asked), program_of(asked).run_first()
    assert first.events == whole.log.events[: len(first.events)]
    assert first.requests == whole.log.requests[: len(first.requests)]
    for share in (60, 80, 95, 99):
        room = whole.replayed().allocated_bytes * share // 100
        assert StepReplay(asked).full_at(room) == whole.full_at(room)
        assert StepReplay(asked).on_card(room) == whole.on_card(room)


@pytest.mark.parametrize("settings", SETTINGS)
def test_a_room_below_what_requests_hold_needs_no_replay(settings: AllocatorSettings):
    """The answer is that of the replay: the least room that it accepts is never below the bound."""
    step = StepReplay(_job(stage=3))
    for percent in (100, 102, 105, 120):
        room = step.held_bytes * percent // 100
        assert step.fits(room, settings) == step.on_card(room, settings).fits
    assert not step.fits(step.held_bytes - 1, settings)
    assert not step.on_card(step.held_bytes - 1, settings).fits


@pytest.mark.parametrize("options", [{}, _AWAY, {"zero_hpz_partition_size": 2}, {"overlap_comm": False, **_AWAY}])
def test_micro_batches_of_a_kind_are_written_and_replayed_once(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    """Their requests are those of micro-batches written one by one, and the allocator ends in the same state."""
    asked = job(
        model="gpt2", gpus=8, engine="deepspeed", stage=3, seq_len=128, grad_accum=4, deepspeed=DeepSpeedOptions(**options)
    )
    short = StepReplay(asked)
    with monkeypatch.context() as one_by_one:
        one_by_one.setattr(deepspeed_stage3.Step, "kind_of", lambda *_: None)
        long = StepReplay(asked)
        assert not long.log.repeated
    assert len(short.log.repeated) >= 4
    for name in ("events", "requests", "spans", "calls", "held", "products"):
        assert getattr(short.log, name) == getattr(long.log, name)
    for settings in SETTINGS:
        assert short.replayed(settings) == long.replayed(settings)
        room = short.replayed(settings).reserved_bytes
        for less in (0, room // 50, room // 20):
            assert short.on_card(room - less, settings) == long.on_card(room - less, settings)


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize(
    ("engine", "stage", "syncs"),
    [
        *(("deepspeed", stage, True) for stage in (0, 1, 2)),
        *((name, 3 * (name == "fsdp2"), syncs) for name in ("ddp", "fsdp2") for syncs in (True, False)),
    ],
)
def test_what_later_steps_repeat_is_what_they_would_write(
    engine: str, stage: int, micro_batches: int, monkeypatch: pytest.MonkeyPatch, *, syncs: bool
):
    """Also where the micro-batches of a step leave gradients to its end."""
    asked = job(model="gpt2", gpus=8, engine=engine, stage=stage, seq_len=128, grad_accum=micro_batches)
    asked = replace(asked, recipe=replace(asked.recipe, sync_every_micro_batch=syncs))
    repeats = list[object]()
    monkeypatch.setattr(Log, "repeat", lambda *of, repeat=Log.repeat: repeats.append(repeat(*of)))
    short = StepReplay(asked)
    assert short.replayed()
    assert repeats
    monkeypatch.setattr(Log, "written_since", lambda *_: None)
    long = StepReplay(asked)
    for name in ("events", "requests", "spans", "calls", "held", "products"):
        assert getattr(short.log, name) == getattr(long.log, name)
    assert short.replayed() == long.replayed()


def test_a_micro_batch_that_keeps_gradients_of_earlier_ones_is_not_repeated(monkeypatch: pytest.MonkeyPatch):
    """A single rank's gradients stay where the first micro-batch made them, under another key from the last one on."""
    options = DeepSpeedOptions(overlap_comm=True, contiguous_gradients=False)
    asked = job(model="gpt2", gpus=1, engine="deepspeed", stage=1, seq_len=128, grad_accum=3, deepspeed=options)
    short = StepReplay(asked)
    monkeypatch.setattr(Log, "written_since", lambda *_: None)
    long = StepReplay(asked)
    assert short.log.events == long.log.events
    assert short.replayed() == long.replayed()


def test_an_estimate_with_a_replay_has_a_figure_where_it_had_a_band():
    """The replay gives the expected figure, inside a band around its own ends that is narrower than without a replay."""
    one = _job(stage=3)
    without, there, step = estimate(one).reserved, estimate(one, replay=True).reserved, StepReplay(one)
    assert there.expected_bytes == step.replayed().reserved_bytes
    least, most = step.ends()
    assert there.low_bytes <= least <= there.expected_bytes <= most <= there.high_bytes
    assert there.high_bytes - there.low_bytes < (without.high_bytes - without.low_bytes) / 2


@pytest.mark.parametrize(
    "choices",
    [
        {**_LLAMA, "tensor_parallel": 2}, {**_LLAMA, "context_parallel": 2}, {**_LLAMA, "lora_rank": 8, "quantize": "nf4"},
        {"engine": "deepspeed"}, {"engine": "deepspeed", "stage": 2, "deepspeed": DeepSpeedOptions(overlap_comm=True)},
    ],
)  # fmt: skip
def test_the_upper_end_stays_for_jobs_without_records(choices: dict[str, object]):
    """No record has ranks that split the model, or weights that loading quantizes; DeepSpeed's streams are not timed."""
    one = _job(**{"stage": 3, **choices})
    assert not StepReplay(one).is_covered
    assert estimate(one, replay=True).reserved.high_bytes >= estimate(one).reserved.high_bytes


def test_the_ends_of_fsdp1_are_those_of_a_gpu_that_lags_or_keeps_up_and_of_both_starts():
    """Its reserved memory depends on both, and an engine without ``record_stream`` has neither."""
    one = _job(stage=3, engine="fsdp1")
    least, most = StepReplay(one).ends()
    of_each = [
        StepReplay(one, starts=starts, keeps_up=keeps_up).replayed().reserved_bytes
        for starts in ("loaded", "built")
        for keeps_up in (False, True)
    ]  # fmt: skip
    assert len(set(of_each)) > 1
    assert least <= min(of_each) < max(of_each) <= most
    other = StepReplay(_job(stage=3, engine="fsdp2"))
    assert not other.log.marked
    assert StepReplay(other.job, starts="built").ends() == other.ends()


def test_larger_blocks_stay_equal_where_they_were():
    """Requests of up to 1 MiB keep their size; larger ones grow by at most 3.5 KiB."""
    step = StepReplay(_job(stage=3))
    sizes = [one.n_bytes for one in step.log.requests]
    for larger in step._larger:
        more = [new - old for old, new in zip(sizes, larger, strict=True)]
        assert {one for size, one in zip(sizes, more, strict=True) if size <= MIB} == {0}
        assert set(more) <= set(range(0, 4096, 512))
        assert len(set(more)) > 2
    assert len(set(zip(sizes, step._larger[0], strict=True))) == len(set(sizes))


@pytest.mark.parametrize(("recompute", "gib", "is_inside"), [("full", 31.02, False), ("selective", 59.41, True)])
def test_public_figures_of_torchtitan(recompute: str, gib: float, is_inside: bool):
    """Reserved memory of torchtitan's Llama 2 7B on 8 H100 (pytorch/torchtitan, pull request 165), of the whole program.

    With full recomputation its own modules of that commit need other blocks than transformers', so that replay is too low.
    """
    answer = estimate(
        _job(model="llama-2-7b", gpus=8, seq_len=2048, micro_batch=8, keep_logits="fp32", recompute=recompute), replay=True
    )
    low, expected, high = (int(size) / GIB for size in answer.reserved)
    assert (low <= gib <= high) is is_inside
    assert expected == pytest.approx(gib, rel=0.13)


@pytest.mark.parametrize(
    ("choices", "what"),
    [
        ({"engine": "paper"}, "engine 'paper'"),
        (
            {"engine": "deepspeed", "stage": 3, "deepspeed": DeepSpeedOptions(offload_optimizer="nvme", offload_param="nvme")},
            "DeepSpeed's offload to NVMe",
        ),
        (
            {"engine": "deepspeed", "stage": 3, "loss": "fused"},
            "DeepSpeed stage 3 with a loss that takes the head's weight itself",
        ),
        (
            {"model": "granite-3.0-2b", "lora_rank": 8, "recompute": "full", "offload_activations": True},
            "offload of activations beside an embedding that is frozen and scaled",
        ),
        ({"engine": "ddp", "stage": 0, "loss": "chunked"}, "a loss in chunks whose head is the embedding"),
        ({"engine": "fsdp1", "stage": 3, "lora_rank": 8}, "adapters or frozen parameters under FSDP1"),
        (
            {"engine": "fsdp1", "stage": 3, "recompute": "full", "fsdp1": Fsdp1Options(checkpoints_units=True)},
            "checkpoints that call units of FSDP1",
        ),
        ({"model": "gemma-4-e2b", "engine": "ddp", "stage": 0}, "embeddings of each layer"),
        ({"model": "ernie-4.5-21b-a3b", "engine": "deepspeed", "stage": 1}, "DeepSpeed stage 1 of ERNIE with experts"),
        (
            {"model": "olmoe-1b-7b", "engine": "deepspeed", "stage": 3, "recompute": "full"},
            "DeepSpeed stage 3 with recomputed experts beside norms of whole queries",
        ),
    ],
)
def test_what_is_not_known_is_refused_in_one_line(choices: dict[str, object], what: str):
    """The error names the unsupported part."""
    one = job(**{"model": "llama-3.2-1b", "gpus": 4, "seq_len": 128, **choices})  # type: ignore[arg-type]
    with pytest.raises(SpecError, match=f"^the requests of {what} cannot be written out yet"):
        estimate(one, replay=True)


@pytest.mark.parametrize(
    ("name", "changed", "recompute", "what"),
    [
        ("k-exaone-236b-a23b", {"num_shared_experts": 0}, "none", "DeepSpeed stage 3 without shared experts"),
        ("lfm2-8b-a1b", {"attention_bias": True}, "none", "biases of attention that the model's class does not have"),
        ("llama-3.2-1b", {}, "selective", "DeepSpeed stage 3 with selective recomputation, in which DeepSpeed fails"),
    ],
)
def test_what_deepspeed_cannot_run_is_refused_in_one_line(name: str, changed: dict[str, Any], recompute: Recompute, what: str):
    one = job(model=name, gpus=8, seq_len=128, engine="deepspeed", stage=3)
    experts = one.model.moe if "num_shared_experts" in changed else None
    model = replace(one.model, moe=replace(experts, **changed)) if experts else replace(one.model, **changed)
    recipe = replace(one.recipe, recompute=recompute)
    with pytest.raises(SpecError, match=f"^the requests of {what} cannot be written out yet"):
        requests_of(replace(one, model=model, recipe=recipe))


class TestFiles:
    """Files of a predicted step."""

    def test_perfettos_has_counters_phases_and_collectives(self, tmp_path: Path):
        """The counter's highest value is the peak."""
        one = _job(stage=3)
        save_events(trace_of(StepReplay(one).log), "a step", tmp_path / "step.json", force=False)
        events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
        allocated = max(one["args"]["bytes"] for one in events if one["ph"] == "C" and one["name"] == "allocated")
        assert allocated == pytest.approx(estimate(one).peak_bytes, rel=0.2)  # workspaces are not requests of the step
        assert {"forward, step 1", "backward, step 2", "all_gather", "reduce_scatter"} <= {one["name"] for one in events}

    def test_perfettos_has_collectives_of_ranks_that_split_a_model(self, tmp_path: Path):
        """Each collective names its group of ranks."""
        one = _job(model="mixtral-8x7b", gpus=16, stage=3, tensor_parallel=2, expert_parallel=2)
        save_events(trace_of(StepReplay(one).log), "a step", tmp_path / "step.json", force=False)
        events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
        sent = {(one["name"], one["args"]["among"]) for one in events if one.get("tid") == 3 and one["ph"] == "X"}
        assert {("all_gather", "tensor"), ("all_to_all", "experts"), ("reduce_scatter", "shards of experts")} <= sent

    def test_torchs_viewer_reads_the_snapshot(self, tmp_path: Path):
        """The snapshot reader of zeroplan itself accepts the file."""
        log = StepReplay(_job(stage=3)).log
        save_requests(trace_of(log), tmp_path / "step.pickle", force=False)
        assert read_snapshot(tmp_path / "step.pickle")

    def test_a_file_that_is_there_stays(self, tmp_path: Path):
        """``force`` overwrites it."""
        trace, path = trace_of(StepReplay(_job(stage=3)).log), tmp_path / "step.json"
        path.write_text("mine")
        with pytest.raises(SpecError):
            save_events(trace, "a step", path, force=False)
        assert path.read_text() == "mine"
        save_events(trace, "a step", path, force=True)
        assert path.read_text() != "mine"
