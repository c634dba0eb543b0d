"""The first micro-batch of DeepSpeed's stage 3, in which its coordinator records the modules, can be the peak of a run."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from tests.engines.columns import Columns, assert_is_its_points
from zeroplan import estimate, job
from zeroplan.engines.deepspeed import account
from zeroplan.engines.deepspeed.stage3 import first
from zeroplan.engines.deepspeed.stage3.training import Beside
from zeroplan.engines.requests import program_of
from zeroplan.ledger import Phase
from zeroplan.spec.adapter import AdapterSpec
from zeroplan.spec.batch import BatchSpec
from zeroplan.spec.job import JobSpec
from zeroplan.spec.mesh import MeshSpec
from zeroplan.spec.recipe import DeepSpeedOptions, RecipeSpec

if TYPE_CHECKING:
    from zeroplan.engines.account import Account
    from zeroplan.spec.recipe import Optimizer, Recompute

MIXTRAL = job(model="mixtral-8x7b", gpus=1).model
#: Wide experts between few tokens, so that gathered weights decide the peak.
WIDE = replace(
    MIXTRAL, num_hidden_layers=4, hidden_size=256, intermediate_size=4096, num_attention_heads=4, num_key_value_heads=2,
    head_dim=64, vocab_size=1000, moe=replace(MIXTRAL.moe, moe_intermediate_size=4096),  # type: ignore[type-var]
)  # fmt: skip
OPTIONS = {
    "reduce_bucket_size": 200_000, "stage3_prefetch_bucket_size": 100_000, "stage3_max_live_parameters": 400_000,
    "stage3_max_reuse_distance": 400_000,
}  # fmt: skip
SIMULATED, LATER = 321_227_384, 310_091_632
"""Peaks of DeepSpeed 0.19.8's own code on fake tensors, in the first step and in the third; without cuBLAS's workspace."""
WORKSPACE = 64 * 2**20
OFFLOADED: dict[str, Any] = {"offload_optimizer": "cpu", "offload_param": "cpu"}


def asked(
    recompute: Recompute = "none", *, ranks: int = 4, micro: int = 1, optimizer: Optimizer = "adamw", **options: Any
) -> JobSpec:
    recipe = RecipeSpec(
        engine="deepspeed", zero_stage=3, recompute=recompute, optimizer=optimizer,
        deepspeed=DeepSpeedOptions(**{**OPTIONS, **options}),
    )  # fmt: skip
    return JobSpec(
        model=WIDE, recipe=recipe, mesh=MeshSpec(dp_shard=ranks), batch=BatchSpec(seq_len=64, grad_accum_steps=micro)
    )


def highest(answer: Account, *, of_first: bool) -> int:
    """Return the peak of the first micro-batch, or of later ones and their step. [bytes]"""
    others = (Phase.INIT, Phase.FIRST)
    moments = (one for one in answer.moments if (one.phase is Phase.FIRST if of_first else one.phase not in others))
    return max((int(one.total_bytes) for one in moments), default=0)


def account_of(one: JobSpec) -> Account:
    return account(one.model, one.recipe, one.mesh, one.batch)


def test_the_first_micro_batch_is_the_peak() -> None:
    """The graph holds the experts' weights that the coordinator has released, and the backward gathers them once more."""
    one = asked(**OFFLOADED)
    answer, found = estimate(one), account_of(one)
    assert answer.peak.name == "first micro-batch: experts gathered for their backward"
    assert answer.peak.phase is Phase.FIRST
    assert answer.peak_bytes - WORKSPACE == pytest.approx(SIMULATED, rel=1e-5)
    assert highest(found, of_first=False) == pytest.approx(LATER, rel=1e-4)
    assert _most(one) == highest(found, of_first=True)


@pytest.mark.parametrize(("recompute", "options"), [("full", OFFLOADED), ("none", {}), ("full", {})])
def test_a_first_micro_batch_that_needs_less_has_no_moments(recompute: Recompute, options: dict[str, Any]) -> None:
    """With the optimizer on the GPU its states are made after the first micro-batch."""
    one = asked(recompute, **options)
    answer = estimate(one)
    assert not any(moment.phase is Phase.FIRST for moment in answer.engine_moments)
    assert _most(one) < answer.peak_bytes


@pytest.mark.parametrize("case", [{"ranks": 512}, {"optimizer": "sgd"}, {"optimizer": "adagrad"}], ids=str)
def test_without_offload_it_is_the_peak_if_the_states_that_are_made_later_are_small(case: dict[str, Any]) -> None:
    """On many ranks, with an optimizer without states, and with Adagrad, whose states exist before the first step."""
    one = asked(**case)
    answer = estimate(one)
    assert answer.peak.phase is Phase.FIRST
    assert answer.peak_bytes - WORKSPACE == pytest.approx(_most(one), rel=2e-3)


@pytest.mark.parametrize("options", [{}, OFFLOADED], ids=["on the GPU", "offloaded"])
def test_what_is_left_out_is_never_the_peak(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    """The same with every bound switched off, so that all moments of the first micro-batch are made."""
    recomputes: tuple[Recompute, ...] = ("none", "full")
    counts = [(recompute, ranks, micro) for recompute in recomputes for ranks in (1, 2, 8, 64, 512) for micro in (1, 2)]
    jobs = [asked(recompute, ranks=ranks, micro=micro, **options) for recompute, ranks, micro in counts]
    before = [max(highest(found, of_first=True), highest(found, of_first=False)) for found in map(account_of, jobs)]
    monkeypatch.setattr(first, "most_at_first", lambda _: None)
    monkeypatch.setattr(first, "most_noted", lambda _: 10**12)
    monkeypatch.setattr(first, "more_than", lambda *_, **__: 10**12)
    monkeypatch.setattr(first, "Beside", lambda *given: Beside(*given)._replace(spare=-(10**12), are_higher_in_forward=False))
    after = [max(highest(found, of_first=True), highest(found, of_first=False)) for found in map(account_of, jobs)]
    assert before == after


def test_a_column_of_ranks_and_micro_batches_is_its_points() -> None:
    points = [
        (MeshSpec(dp_shard=ranks), BatchSpec(seq_len=64, grad_accum_steps=micro)) for ranks in (2, 8, 512) for micro in (1, 2)
    ]
    one = asked()
    whole = account(one.model, one.recipe, *(Columns(points),) * 2)  # type: ignore[arg-type]
    singles = [account(one.model, one.recipe, mesh, batch) for mesh, batch in points]
    assert_is_its_points(whole, singles)
    assert {highest(single, of_first=True) > 0 for single in singles} == {True, False}


def test_only_a_steps_last_micro_batch_takes_norms() -> None:
    """DeepSpeed 0.19.8, stage3.py, partition_grads: ``is_gradient_accumulation_boundary``."""
    alone, several = (account_of(asked(micro=micro, **OFFLOADED)) for micro in (1, 2))
    name = "first micro-batch: bucket reduced during the backward"
    at_end, before = (max(int(one.total_bytes) for one in found.moments if one.name == name) for found in (alone, several))
    assert before < at_end


def test_the_second_micro_batch_gathers_small_parameters_flat_with_large_ones() -> None:
    """The first has released them. With LoRA nothing else is as large as the head, which is gathered with the final norm.

    DeepSpeed 0.19.8's own code on fake tensors needs 690,171,097 bytes in the first step and 533,998,321 in the second.
    """
    recipe = RecipeSpec(
        engine="deepspeed", zero_stage=3, optimizer="adagrad",
        deepspeed=DeepSpeedOptions(
            contiguous_gradients=False, stage3_prefetch_bucket_size=5_000_000, stage3_max_reuse_distance=0
        ),
    )  # fmt: skip
    model = replace(job(model="qwen2.5-0.5b", gpus=1).model, num_hidden_layers=3, adapter=AdapterSpec(rank=8))
    one = JobSpec(model=model, recipe=recipe, mesh=MeshSpec(dp_shard=8), batch=BatchSpec(seq_len=64, grad_accum_steps=2))
    answer = estimate(one)
    assert answer.peak.name == "second micro-batch: forward of a block"
    assert answer.peak_bytes - WORKSPACE == pytest.approx(690_171_097, rel=1e-3)
    later = (one for one in answer.engine_moments if one.phase not in (Phase.INIT, Phase.FIRST))
    assert max(int(one.total_bytes) for one in later) == pytest.approx(533_998_321, rel=1e-3)


def _most(one: JobSpec) -> int:
    """Return the most that the requests of the first micro-batch hold. [bytes]"""
    log, total, most = program_of(one).run_first(), 0, 0
    for event in log.events:
        total += log.requests[event].n_bytes if event >= 0 else -log.requests[-1 - event].n_bytes
        most = max(most, total)
    return most
