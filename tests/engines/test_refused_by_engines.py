"""Settings without formulas are refused in one line; a column of jobs gives the same as its jobs one by one."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pytest

from tests.profiles import by_hand
from zeroplan import BatchSpec, JobSpec, MeshSpec, RecipeSpec, SpecError, estimate, job
from zeroplan.engines import deepspeed, fsdp2
from zeroplan.engines.deepspeed.quantized_gradients import Split, reduction_bytes
from zeroplan.spec.profile import model_of
from zeroplan.spec.recipe import DeepSpeedOptions

if TYPE_CHECKING:
    from zeroplan import ModelSpec
    from zeroplan.spec.profile import Profile

IN_FP32 = DeepSpeedOptions(grad_accum_dtype="fp32")


def traced(profile: Profile, stage: int = 3, ranks: int = 4) -> JobSpec:
    recipe = RecipeSpec(engine="deepspeed", zero_stage=stage, precision="bf16")
    return JobSpec(model=model_of(profile), recipe=recipe, mesh=MeshSpec(dp_shard=ranks), batch=BatchSpec(seq_len=64))


@pytest.mark.parametrize(
    ("said", "options", "line"),
    [
        ({}, {"offload_optimizer": "cpu"},
         "grad_accum_dtype 'fp32' at stage 1 with offload_optimizer is not modelled; use stage 2"),
        ({"precision": "bf16"}, {},
         "grad_accum_dtype 'fp32' at stage 1 with precision 'bf16' is not modelled; use 'bf16-mixed'"),
    ],
)  # fmt: skip
def test_unmodelled_fp32_sums_at_stage_1_are_refused(said: dict[str, str], options: dict[str, str], line: str):
    asked = job(model="gpt2", gpus=2, engine="deepspeed", stage=1, deepspeed=replace(IN_FP32, **options), **said)
    with pytest.raises(SpecError) as refused:
        estimate(asked)
    assert str(refused.value) == line
    assert estimate(replace(asked, recipe=replace(asked.recipe, precision="bf16-mixed", deepspeed=IN_FP32))).peak_bytes > 0


def test_profiles_with_experts_or_stray_parameters_are_refused_at_stage_3():
    whole = by_hand()
    assert estimate(traced(whole)).peak_bytes > 0
    routed = replace(whole, modules=replace(whole.modules, kinds=whole.modules.kinds | {"Odd": ("mix", "norm", "mlp.experts")}))
    said = "a profile with experts is not modelled at stage 3 of engine 'deepspeed'; use a lower stage, or fsdp2"
    with pytest.raises(SpecError, match=said):
        estimate(traced(routed))
    assert estimate(traced(routed, stage=2)).peak_bytes > 0
    homeless = replace(whole, modules=replace(whole.modules, kinds=whole.modules.kinds | {"Odd": ("mix",)}))
    with pytest.raises(SpecError, match=r"parameter 'norm.weight' of the profile belongs to no module that runs by itself"):
        estimate(traced(homeless))


class Columns(NamedTuple):
    """A mesh and a batch of several jobs at once."""

    dp_shard: np.ndarray
    micro_batch_size: np.ndarray
    seq_len: np.ndarray
    grad_accum_steps: np.ndarray
    dp_replicate: int = 1
    tp: int = 1
    cp: int = 1
    pp: int = 1
    ep: int = 1


def columns(*points: tuple[int, int, int, int], **degrees: int) -> Columns:
    return Columns(*(np.array(column, dtype=np.int64) for column in zip(*points, strict=True)), **degrees)


def test_windows_on_ranks_that_split_the_model():
    """A column of lengths within the window works. Longer ones are refused, as for a single job."""
    mistral, recipe = job(model="mistral-7b", gpus=8).model, RecipeSpec(recompute="full")
    within, beyond = (columns((4, 1, 1024, 1), (4, 1, most, 1), tp=2) for most in (4095, 4096))
    assert any((moment.total_bytes > 0).all() for moment in fsdp2.account(mistral, recipe, within, within).moments)
    with pytest.raises(SpecError, match="tp=2 with a sliding window shorter than the sequence is not modelled; use tp=1"):
        fsdp2.account(mistral, recipe, beyond, beyond)


def test_a_column_of_a_profile_cannot_mix_one_sequence_and_several():
    asked = traced(by_hand())
    mixed, several = (columns((4, least, 64, 1), (4, 3, 64, 1)) for least in (1, 2))
    with pytest.raises(SpecError, match="micro-batches of one sequence and of several are different programs"):
        deepspeed.account(asked.model, asked.recipe, mixed, mixed)
    assert deepspeed.account(asked.model, asked.recipe, several, several).moments


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("bucket", [3000, 500_000_000])
def test_a_column_of_a_profile_under_deepspeed_is_its_jobs(stage: int, bucket: int):
    asked = traced(by_hand(), stage)
    recipe = replace(asked.recipe, deepspeed=DeepSpeedOptions(reduce_bucket_size=bucket))
    same_as_its_points(asked.model, recipe, [(2, 2, 64, 1), (3, 5, 96, 2), (64, 2, 32, 1)])


def test_a_column_that_reaches_beyond_the_window_under_deepspeed_is_its_jobs():
    """Such a column has jobs whose attention needs a mask and jobs whose attention does not."""
    mistral = replace(job(model="mistral-7b").model, num_hidden_layers=3)
    recipe = RecipeSpec(engine="deepspeed", zero_stage=2, deepspeed=DeepSpeedOptions(reduce_bucket_size=20_000_000))
    same_as_its_points(mistral, recipe, [(2, 1, 1024, 1), (3, 1, 4096, 2), (64, 2, 8192, 1)])


def same_as_its_points(model: ModelSpec, recipe: RecipeSpec, points: list[tuple[int, int, int, int]]) -> None:
    together = columns(*points)
    whole = deepspeed.account(model, recipe, together, together)
    for at, (ranks, size, length, steps) in enumerate(points):
        batch = BatchSpec(micro_batch_size=size, seq_len=length, grad_accum_steps=steps)
        alone = deepspeed.account(model, recipe, MeshSpec(dp_shard=ranks), batch)
        peaks = [int(np.broadcast_to(moment.total_bytes, len(points))[at]) for moment in whole.moments]
        assert max(peaks) == max(moment.total_bytes for moment in alone.moments)
        sent = [int(np.broadcast_to(call.sent_bytes, len(points))[at]) for call in whole.collectives]
        assert sum(sent) == sum(call.sent_bytes for call in alone.collectives)


def test_norms_that_ranks_do_not_divide_are_padded_if_gradients_are_quantized():
    """Ten elements on four ranks are padded to twelve, of which each rank keeps three; keeping them in fp32 needs a copy."""
    assert reduction_bytes(((10,),), Split(4, 2, element=2, kept=2)) == 2 * 12
    assert reduction_bytes(((10,),), Split(4, 2, element=2, kept=4)) == 2 * 12 + 4 * 3
    assert reduction_bytes(((12,),), Split(4, 2, element=2, kept=4)) == 4 * 3  # reduced in place
