"""Every suggested change makes the job fit, and none is absurd."""

import random
import shlex
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from types import FrameType

import pytest

from tests.combined import every_case
from zeroplan import Estimate, JobSpec, SpecError, estimate, job
from zeroplan.cli.app import main
from zeroplan.engines.deepspeed import notes, order
from zeroplan.remedies import Remedy, _Candidate, _counted, _flags_of, remedies, single_changes

MODELS = ("gpt2-xl", "llama-3.2-3b", "llama-3.1-8b", "qwen2.5-14b", "yi-34b", "llama-3.1-70b", "mixtral-8x7b", "qwen3-30b-a3b",
          "deepseek-v3", "gpt-oss-20b", "opt-30b")  # fmt: skip
GPUS = ("rtx-4090", "a100-40gb", "h100", "mi300x", "t4", "l4")


def random_job(draw: random.Random) -> JobSpec:
    engine, stage = draw.choice([("ddp", 0), ("ddp", 1), ("fsdp2", 2), ("fsdp2", 3), ("deepspeed", 0), ("deepspeed", 1),
                                 ("deepspeed", 2), ("deepspeed", 3), ("paper", 0), ("paper", 3)])  # fmt: skip
    gpus = draw.choice((1, 2, 8, 24, 64, 512))
    return job(
        model=draw.choice(MODELS), gpu=draw.choice(GPUS), engine=engine, stage=stage, gpus=gpus,
        replicas=draw.choice((1, 2)) if engine == "fsdp2" and gpus > 1 else 1,
        micro_batch=draw.choice((1, 2, 3, 8, 12)), seq_len=draw.choice((512, 1000, 1024)),
        grad_accum=draw.choice((1, 4)), recompute=draw.choice(("none", "selective", "full")),
        optimizer=draw.choice(("adamw", "adamw", "adam", "sgd", "muon")), attention=draw.choice(("sdpa", "eager")),
        keep_logits=draw.choice((None, True, "fp32")), sync_every_micro_batch=draw.choice((None, False)),
    )  # fmt: skip


def not_fitting(seed: int) -> Iterator[Estimate]:
    draw = random.Random(seed)  # noqa: S311  examples, not secrets
    while True:
        try:
            answer = estimate(random_job(draw))
        except SpecError:  # DeepSpeed does not accept this optimizer
            continue
        if answer.fits is False:
            yield answer


def as_flags(asked: JobSpec) -> list[str]:
    """The flags of a job, with names of model and GPU instead of their entries."""
    recipe, mesh, batch = asked.recipe, asked.mesh, asked.batch
    assert asked.cluster.gpu is not None
    said = {
        "model": asked.model.name, "gpu": asked.cluster.gpu.name, "engine": recipe.engine, "stage": recipe.zero_stage,
        "gpus": mesh.world_size, "replicas": mesh.dp_replicate, "micro-batch": batch.micro_batch_size,
        "seq-len": batch.seq_len, "grad-accum": batch.grad_accum_steps, "recompute": recipe.recompute,
        "optimizer": recipe.optimizer, "attention": recipe.attention, "loss": recipe.loss,
        "keep-logits": {False: "no", True: "yes"}.get(recipe.keep_logits, recipe.keep_logits),
    }  # fmt: skip
    switches = [f"--{'' if recipe.sync_every_micro_batch else 'no-'}sync-every-micro-batch"]
    return [word for key, value in said.items() for word in (f"--{key}", str(value))] + switches


def exit_code(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> int:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert capsys.readouterr().err == ""
    return int(ended.value.code or 0)


@pytest.mark.parametrize("seed", range(8))
def test_the_flags_of_every_suggestion_make_the_job_fit(
    seed: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    for answer in islice(not_fitting(seed), 12 if every_case() else 5):
        asked = ["estimate", *as_flags(answer.job), "--check"]
        assert exit_code(asked, capsys) == 1
        for one in remedies(answer):
            assert one.room_bytes >= 0
            after = [*asked, *shlex.split(one.flags)]
            assert exit_code(after, capsys) == (1 if one.needs_expandable_segments else 0), (asked, one)
            monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
            assert exit_code(after, capsys) == 0, (asked, one)
            monkeypatch.delenv("PYTORCH_ALLOC_CONF")


@pytest.mark.parametrize("seed", range(100, 104))
def test_no_suggestion_is_silly(seed: int):
    for answer in islice(not_fitting(seed), 25 if every_case() else 10):
        found = remedies(answer)
        flags = [one.flags.split() for one in found]
        ideas = {tuple(word for word in flag if word.startswith("--")) for flag in flags}
        assert len(ideas) == len(flags) <= 5, "the same idea twice"
        assert all(no_more_gpus_without_sharding(answer, one) for one in flags)
        assert all(says_which_engine(answer, one) for one in found)
        if len(found) > 1:
            assert "adamw-8bit" not in found[0].flags
        if answer.job.recipe.engine == "deepspeed" and answer.job.recipe.optimizer.startswith("adam"):
            assert not any("--optimizer-impl" in flag for flag in flags), "DeepSpeed's Adam is fused already"


def no_more_gpus_without_sharding(answer: Estimate, flags: list[str]) -> bool:
    return "--gpus" not in flags or answer.job.recipe.zero_stage > 0 or "--stage" in flags


def says_which_engine(answer: Estimate, one: Remedy) -> bool:
    before, words = answer.job.recipe.engine, one.flags.split()
    if "--engine" not in words or words[words.index("--engine") + 1] == before:
        return True
    return before in one.change or "FSDP2" in one.change


@pytest.mark.parametrize("seed", range(200, 202))
def test_a_combination_has_no_change_too_many(seed: int):
    for answer in islice((one for one in not_fitting(seed) if remedies(one)), 20):
        found = remedies(answer)
        if len(found) > 1 or ";" not in found[0].change:
            continue
        # If one part were enough, it would be offered alone.
        assert found[0].flags.count("--") > 1


def test_uneven_expert_shards_lead_to_deepspeed():
    answer = estimate(job(model="mixtral-8x22b", gpu="h100", gpus=64, stage=3, engine="fsdp2", recompute="full"))
    assert answer.fits is False
    assert "--engine deepspeed" in [one.flags for one in remedies(answer)]


def test_replicas_are_given_up_for_shards():
    answer = estimate(job(model="llama-3.1-8b", gpu="a100-40gb", gpus=16, stage=3, replicas=8, recompute="full"))
    assert answer.fits is False
    assert any(one.flags.startswith("--replicas") for one in remedies(answer))


def test_a_large_model_on_one_gpu_is_sharded_over_more():
    answer = estimate(job(model="llama-3.1-70b", gpu="h100"))
    (only,) = remedies(answer)
    assert "--gpus" in only.flags
    assert "--stage 3" in only.flags


def test_what_fits_or_names_no_gpu_needs_no_remedy():
    assert remedies(estimate(job(model="gpt2", gpu="h100"))) == ()
    assert remedies(estimate(job(model="llama-3.1-405b"))) == ()


@pytest.mark.parametrize(
    ("asked", "millions"),
    [
        ({"model": "deepseek-v3", "gpu": "t4", "gpus": 8}, 1),
        ({"model": "kimi-k2", "gpu": "h100", "gpus": 8, "engine": "deepspeed", "stage": 1}, 1),
        ({"params": "1e13", "gpu": "h100", "gpus": 8, "micro_batch": 10**15, "seq_len": 10**9}, 1),
        ({"params": "7e9", "gpu": "h100", "micro_batch": 999_999_999_999_989}, 1),
        ({"model": "deepseek-v3", "gpu": "h100", "gpus": 8}, 2),  # one replay
        ({"model": "llama-3.1-405b", "gpu": "h100", "gpus": 64}, 2),  # two
    ],
)
def test_suggestions_come_at_once(asked: dict[str, object], millions: int):
    """Counts function calls, since seconds depend on the machine's load. A million calls take about half a second."""
    assert _calls(estimate(job(**asked))) < 1_000_000 * millions


def test_of_a_flag_that_two_changes_set_the_later_value_is_told():
    shard, away = (_Candidate("", flags, lambda job: job) for flags in ("--stage 3 --engine fsdp2", "--engine deepspeed"))
    options = _Candidate("", "--set ddp.a=1 --set ddp.b=2", lambda job: job)
    assert _flags_of([shard, options, away]) == "--stage 3 --engine deepspeed --set ddp.a=1 --set ddp.b=2"


def _calls(answer: Estimate) -> int:
    """The number of Python function calls that ``remedies`` makes, with empty caches."""
    for kept in (notes.gathered, notes.gathered_by_several, order.trace, _counted):
        kept.cache_clear()
    calls, before = 0, sys.getprofile()

    def counted(_frame: FrameType, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(counted)
    try:
        remedies(answer)
    finally:
        sys.setprofile(before)
    return calls


def test_inputs_of_blocks_go_to_host_memory_where_that_is_enough():
    short = estimate(job(model="llama-3.1-70b", gpus=64, gpu="a100-sxm-80gb", seq_len=32768, recompute="full", loss="fused"))
    assert "--offload-activations" in [remedy.flags for remedy in remedies(short)]
    recomputed_not = estimate(replace(short.job, recipe=replace(short.job.recipe, recompute="none")))
    assert not any(remedy.flags == "--offload-activations" for remedy in remedies(recomputed_not))


def test_changes_that_the_engine_does_not_take_are_left_out():
    """Liger has no fused loss for Granite, so the job itself refuses it."""
    plain, granite = (job(model=name, gpu="h100", recompute="full") for name in ("llama-3.2-1b", "granite-3.0-2b"))
    assert "--loss fused" in [one.flags for one in single_changes(plain)]
    assert "--loss fused" not in [one.flags for one in single_changes(granite)]
    with pytest.raises(SpecError, match="Liger has none for family 'granite'"):
        replace(granite, recipe=replace(granite.recipe, loss="fused"))


def test_where_some_blocks_are_recomputed_all_of_them_are_the_next_step():
    some = job(model="llama-3.1-8b", gpu="h100", gpus=8, engine="fsdp2", stage=3, recompute="full", recompute_layers=4)
    flags = [one.flags for one in single_changes(some)]
    assert "--recompute full --recompute-layers 32" in flags
    assert "--recompute full" not in flags
    short = estimate(replace(some, batch=replace(some.batch, seq_len=16_384)))
    (found,) = (one for one in remedies(short) if one.flags == "--recompute full --recompute-layers 32")
    every = estimate(replace(short.job, recipe=replace(some.recipe, recompute_layers=None)))
    assert (short.fits, every.fits) == (False, True)
    assert found.needed_bytes == every.least_bytes
