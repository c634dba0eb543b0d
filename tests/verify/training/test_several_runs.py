"""FSDP2 training several adapters beside each layer: peak, phases and collectives are as estimated."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest

from tests.simulated import on_the_fake_gpu
from tests.verify.training.test_adapted import job, of_experts, with_words
from zeroplan.comparison import compare_with_estimate
from zeroplan.replay import StepReplay
from zeroplan.spec.adapter import AdapterSpec
from zeroplan.spec.mesh import MeshSpec
from zeroplan.spec.recipe import PRIME_RL, Fsdp2Options

if TYPE_CHECKING:
    from zeroplan.measurement import Measurement
    from zeroplan.spec.job import JobSpec
    from zeroplan.verify.training.workload import Workload

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = pytest.mark.torch

FOUR = AdapterSpec(rank=8, runs=4, learning=1, base="fp32")


def _workload(asked: JobSpec) -> Workload:
    from tests.transformer.many_adapters import with_many_adapters
    from tests.transformer.prime_rl_experts import with_prime_rl_experts
    from zeroplan.verify.training.activations_away import offload_blocks
    from zeroplan.verify.training.engine import weights_dtype
    from zeroplan.verify.training.modules import find_blocks
    from zeroplan.verify.training.recomputation import recompute_blocks
    from zeroplan.verify.training.workload import workload

    adapter = asked.model.adapter
    recipe = replace(asked.recipe, recompute="none", offload_activations=False, fused_kernels=None)
    bare = replace(asked, model=replace(asked.model, adapter=None), recipe=recipe)
    made = workload(bare, dtype=weights_dtype(asked), device="cuda")
    if adapter is not None:
        with_many_adapters(made.module, adapter, family=asked.model.family)
    if PRIME_RL in asked.recipe.fused_parts:
        with_prime_rl_experts(made.module, asked.model)
    recompute_blocks(made.blocks, asked.recipe.recompute)
    if asked.recipe.offload_activations:
        offload_blocks(made.module, made.blocks)
    return made._replace(blocks=find_blocks(made.module))


def run(asked: JobSpec) -> Measurement:
    """Run the job with our modules and an optimizer for each adapter that learns."""
    from zeroplan.verify.backends.simulate import simulate
    from zeroplan.verify.training import fsdp2

    if asked.model.adapter is None:
        return simulate(asked, steps=3, make=partial(_workload, asked))
    make, learning = fsdp2.make_optimizer, asked.model.adapter.stepped  # type: ignore[union-attr]

    def of_those_that_learn(parameters: Any, *others: Any) -> Any:
        chosen = [one for number, one in enumerate(parameters) if number % asked.model.adapter.runs < learning]  # type: ignore[union-attr]
        return make(chosen, *others)

    with patch.object(fsdp2, "make_optimizer", of_those_that_learn):
        return simulate(asked, steps=3, make=partial(_workload, asked))


#: All that differs is outside the model's tensors, such as the loss. [bytes]
SMALL = 16 * 1024
#: What the allocator reserves at once for small tensors, of which the requests leave out those of a few bytes. [bytes]
SEGMENT = 2 * 2**20
ONE_RANK = MeshSpec(dp_shard=1)
JOBS = {
    "one of four learns, accumulation": job(FOUR, "fsdp2", 3, accum=2),
    "some layers, recomputed, accumulation": job(replace(FOUR, targets="q_proj,v_proj"), "fsdp2", 3, recompute="full", accum=2),
    "one adapter that learns, one rank, recomputed": replace(
        job(replace(FOUR, runs=1, learning=None), "fsdp2", 3, recompute="full"), mesh=ONE_RANK
    ),
    "units of embedding and head": with_words(
        job(FOUR, "fsdp2", 3, recompute="full", accum=2, fsdp2=Fsdp2Options(ends_apart=True))
    ),
    "16 bits, one after the other": job(replace(FOUR, base="compute", looped=True), "fsdp2", 2, precision="bf16", accum=2),
    "inputs of blocks in host memory": job(FOUR, "fsdp2", 3, recompute="full", accum=2, offload_activations=True),
}


@pytest.mark.parametrize("name", JOBS)
def test_many_adapters_take_what_is_estimated(name: str):
    assert_as_estimated(JOBS[name], SEGMENT)


def assert_as_estimated(asked: JobSpec, within: int) -> None:
    """Demand that the run agrees with the estimate, and its reserved memory with the replay within this many bytes."""
    measured = on_the_fake_gpu(run, asked)
    compared = compare_with_estimate(measured)
    assert all(abs(one.difference) < SMALL for one in (compared.peak, *compared.phases)), (compared.peak, compared.phases)
    assert all(row.difference == 0 for row in compared.collectives), compared.collectives
    for one in measured.allocator:
        shown = StepReplay(asked).replayed(one.settings)
        assert abs(shown.reserved_bytes - one.reserved_bytes) <= within, (shown, one)


def test_gradients_that_share_a_buffer_are_bounded():
    """A new buffer comes to each unit in the backward, beside that of adapters that did not step. The estimate always has both."""
    asked = job(FOUR, "fsdp2", 3)
    compared = compare_with_estimate(on_the_fake_gpu(run, asked))
    (gradients,) = (one for one in compared.kinds if one.what == "gradients")
    assert gradients.predicted == 2 * gradients.measured
    assert 0 <= compared.peak.difference <= gradients.measured, compared.peak


def with_their_experts(few: JobSpec, family: str, adapter: AdapterSpec | None) -> JobSpec:
    """Return the job with prime-rl's experts; GLM has a dense first layer and a shared expert."""
    wide = of_experts(family, replace(few, model=replace(few.model, adapter=None)))
    moe = replace(wide.model.moe, num_shared_experts=1, num_dense_layers=1) if family == "glm4_moe" else wide.model.moe  # type: ignore[type-var]
    recipe = replace(wide.recipe, fused_kernels=PRIME_RL)
    return replace(wide, model=replace(wide.model, moe=moe, adapter=adapter), recipe=recipe)


_PLAIN = job(FOUR, "fsdp2", 3, recompute="full", accum=2)
OF_EXPERTS = {
    "full training": with_their_experts(_PLAIN, "qwen3_moe", None),
    "full training, shared experts": with_their_experts(replace(_PLAIN, mesh=ONE_RANK), "glm4_moe", None),
    "adapters": with_their_experts(_PLAIN, "qwen3_moe", FOUR),
    "adapters, shared experts": with_their_experts(_PLAIN, "glm4_moe", FOUR),
    "16 bits, attention alone": with_their_experts(
        job(replace(FOUR, base="compute"), "fsdp2", 2, precision="bf16", accum=2),
        "qwen3_moe",
        replace(FOUR, base="compute", targets="attention"),
    ),
    "inputs of blocks in host memory": with_their_experts(
        job(FOUR, "fsdp2", 3, recompute="full", accum=2, offload_activations=True), "qwen3_moe", FOUR
    ),
}


@pytest.mark.parametrize("name", OF_EXPERTS)
def test_their_experts_take_what_is_estimated(name: str):
    """Replays of these small steps differ by up to three segments of 2 MiB."""
    assert_as_estimated(OF_EXPERTS[name], 3 * SEGMENT)
