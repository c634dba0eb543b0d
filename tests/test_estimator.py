"""Checks the estimator's additions to an engine's moments: the verdict, and DeepSpeed's construction through host memory."""

from dataclasses import replace

import pytest

from tests.engines_that_run import STAGES
from tests.formulas import assert_explained
from zeroplan import Estimate, estimate, job
from zeroplan.estimator import replayed_if_tight
from zeroplan.ledger import Kind, Phase
from zeroplan.units import format_size


def answer(**said: object) -> Estimate:
    return estimate(job(**said))


def construction(found: Estimate) -> int:
    return max(int(moment.total_bytes) for moment in found.moments if moment.phase is Phase.INIT)


@pytest.mark.parametrize(
    "said",
    [
        {"model": "falcon-h1-7b", "gpus": 2, "lora_rank": 8, "lora_targets": "attention,mlp,in_proj"},
        {"model": "glm-5.2", "gpus": 512},
    ],
    ids=["Mamba with a norm, adapters", "layers that share picked keys"],
)
def test_lines_of_every_kind_of_layer_are_explained(said: dict[str, object]):
    """Symbols of formulas contain the kind of the layers."""
    assert_explained(answer(**said, stage=3))


@pytest.mark.parametrize("stage", [1, 2])
def test_deepspeed_flattens_through_host_memory_only_where_the_gpu_has_no_room(stage: int):
    """Two copies of 25e9 parameters in 16 bits are 100 GB: more than an H100 has, less than an H200."""
    said = {"params": 25_000_000_000, "gpus": 512, "stage": stage, "engine": "deepspeed", "recompute": "full", "seq_len": 512}
    small, large = answer(**said, gpu="h100"), answer(**said, gpu="h200")
    assert construction(small) < 85e9
    assert construction(large) >= 100e9
    assert any("host memory" in note for note in small.notes)
    assert small.fits is (stage == 2), "stage 1 keeps whole gradients"
    assert small.job.recipe.deepspeed.flatten_on_accelerator, "the job stays as it was asked for"
    assert construction(answer(**said)) == construction(large)


def test_the_peak_has_the_workspaces_and_the_moments_have_them_too():
    found = answer(params=1_000_000_000, gpus=8, gpu="h100")
    assert found.peak_bytes == max(int(moment.total_bytes) for moment in found.moments)
    assert all(any(line.kind is Kind.WORKSPACE for line in moment.lines) for moment in found.moments)
    assert found.reserved.low_bytes >= found.peak_bytes


@pytest.mark.parametrize(("room", "verdict"), [(-1, "does not fit"), (0, "tight"), (10**12, "fits")])
def test_the_verdict_by_hand(room: int, verdict: str):
    """A GPU with exactly the peak plus the memory outside the allocator is tight; one byte less is too small."""
    found = answer(params=1_000_000_000, gpus=8, gpu="h100")
    gpu = found.job.cluster.gpu
    assert gpu is not None
    memory = replace(gpu.memory_bytes, value=found.least_bytes + room)
    cluster = replace(found.job.cluster, gpu=replace(gpu, memory_bytes=memory))
    assert estimate(replace(found.job, cluster=cluster)).verdict == verdict


def test_a_replay_does_not_decide_where_routing_does():
    """A replay assumes the same number of tokens for each expert-parallel rank, but routing decides it."""
    said = {"model": "mixtral-8x7b", "gpus": 32, "gpu": "h100", "recompute": "full", "seq_len": 512}
    for ranks, is_replayed in ((1, True), (2, False)):
        found = answer(**said, expert_parallel=ranks)
        gpu = found.job.cluster.gpu
        assert gpu is not None
        exactly = replace(gpu, memory_bytes=replace(gpu.memory_bytes, value=found.least_bytes))
        tight = estimate(replace(found.job, cluster=replace(found.job.cluster, gpu=exactly)))
        assert tight.verdict == "tight"
        assert (replayed_if_tight(tight).replay is not None) is is_replayed


@pytest.mark.parametrize(("engine", "stage"), STAGES)
def test_what_is_held_from_step_to_step_does_not_know_of_micro_batches(engine: str, stage: int):
    """Gradients of earlier micro-batches are alive at many moments, but not between steps."""
    said = {"params": 1_000_000_000, "gpus": 8, "engine": engine, "stage": stage}
    one, four = answer(**said), answer(**said, grad_accum=4)
    assert one.held == four.held
    kinds = {line.kind for line in one.held}
    assert {Kind.PARAMETERS, Kind.OPTIMIZER_STATE} <= kinds
    assert (Kind.GRADIENTS in kinds) == (engine == "deepspeed" and stage == 3), "which keeps its share for good"


def test_what_is_no_job_is_told_how_to_become_one():
    with pytest.raises(TypeError, match=r"not 'gpt2'; write estimate\(job\("):
        estimate("gpt2")


def test_an_estimate_is_shown_in_a_line():
    found = answer(model="gpt2", gpus=4, gpu="a100")
    assert str(found) == repr(found)
    assert f"{found.peak.name!r}, fits>" in str(found)
    assert len(str(found)) < 200


@pytest.mark.parametrize(
    ("said", "how"),
    [({}, "fp32"), ({"engine": "deepspeed"}, True), ({"precision": "fp32"}, True), ({"tensor_parallel": 4}, "fp32"),
     ({"context_parallel": 4}, "fp32"), ({"stage": 0, "micro_batch": 16}, "fp32")],
)  # fmt: skip
def test_what_a_loop_that_holds_logits_adds_is_said_to_the_byte(said: dict, how: bool | str):
    plain = estimate(job(model="llama-3.2-1b", gpus=8, **({"stage": 3, "micro_batch": 4} | said)))
    held = estimate(replace(plain.job, recipe=replace(plain.job.recipe, keep_logits=how)))
    more = format_size(held.peak_bytes - plain.peak_bytes)
    assert any(f"needs {more} more: set --keep-logits" in note for note in plain.notes), (more, plain.notes)
    assert any(f"in the backward ({more});" in note for note in held.notes)


def test_nothing_is_said_of_logits_that_do_not_matter():
    """The peak is in the optimizer's step, or the loss never makes all logits."""
    for said in ({"stage": 0}, {"loss": "chunked", "stage": 3}):
        assert not [note for note in estimate(job(model="llama-3.1-8b", gpus=8, **said)).notes if "logits" in note]
