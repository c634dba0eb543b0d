"""Predictions from one saved run, compared with dry runs of the script with other numbers of GPUs, batches and lengths."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.combined import every_case
from tests.dryrun.running import SCRIPTS, dry_run
from zeroplan.errors import SpecError
from zeroplan.estimator import estimate
from zeroplan.from_run import FromRun
from zeroplan.resolve import Request, resolve
from zeroplan.saved_runs.files import read_saved
from zeroplan.script_profile import ScriptProfile
from zeroplan.script_trace import SavedRun

pytestmark = pytest.mark.torch
pytest.importorskip("transformers")

OWN = str(SCRIPTS / "own_model.py")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("from_run")


def saved(folder: Path, name: str, *typed: str, gpus: int) -> SavedRun:
    run = dry_run(*typed, folder=folder, flags=("--gpus", str(gpus), "-q", "--save", name))
    assert run.code == 0, run.errors
    return read_saved(folder / name)


@pytest.fixture(scope="module")
def own(folder: Path) -> SavedRun:
    """Return a run of a user's own model under DDP and autocast, with the loss outside the model: 8 GPUs, 4 x 192 tokens."""
    return saved(folder, "own.json", "--profile", "own", "--", OWN, "--layers", "5", gpus=8)


@pytest.fixture(scope="module")
def sharded(folder: Path) -> SavedRun:
    """Return a run of transformers' Llama under FSDP2: 8 GPUs, 2 x 128 tokens."""
    return saved(folder, "sharded.json", "--profile", "own", "--", str(SCRIPTS / "fsdp2.py"), "2", "128", "128", gpus=8)


def test_a_users_own_loop_on_more_gpus_with_another_batch_and_length(own: SavedRun, folder: Path):
    other = saved(
        folder, "other.json", "--", OWN, "--layers", "5", "--batch", "3", "--seq", "333", gpus=64
    ).run  # fmt: skip
    found = FromRun(own, "own.json")
    rows = 8 * 4 * 193 + 152  # tokens and targets are one tensor, which the loop holds; and a few bytes
    compared = found.own_comparison
    assert -rows <= compared.peak.difference <= 0
    step = next(phase for phase in compared.phases if phase.what == "optimizer step")
    assert step.difference == compared.held.difference  # torch's optimizers use foreach by default
    rows = 8 * 3 * 334 + 154
    peak = found.held_against(other, Request(gpus=64, micro_batch=3, seq_len=333)).peak
    assert -rows <= peak.difference <= 0
    assert own.general is not None
    assert own.general.settings is not None
    assert own.general.varied == ("argument 1 4 x 192",)
    assert own.general.settings.ddp.gradient_as_bucket_view
    assert own.general.settings.keep_logits
    assert (own.general.longest, own.general.too_long) == (1024, 2048)


def test_fsdp2_on_more_gpus_with_another_length(sharded: SavedRun, folder: Path):
    other = saved(folder, "more.json", "--", str(SCRIPTS / "fsdp2.py"), "2", "128", "320", gpus=16).run
    found = FromRun(sharded, "sharded.json")
    assert abs(found.own_comparison.peak.difference) <= 128
    compared = found.held_against(other, Request(gpus=16, seq_len=320))
    assert abs(compared.peak.difference) <= 128
    assert not [row for row in compared.collectives if row.difference and row.what != "all_reduce"]  # clipping's, the loss's


@pytest.mark.skipif(not every_case(), reason="one of EVERY_CASE=1")
def test_a_prediction_for_another_engine_says_that_no_run_confirms_it(folder: Path):
    every = saved(folder, "all.json", "--profile", "all", "--", str(SCRIPTS / "fsdp2.py"), "2", "128", "128", gpus=8)
    found = FromRun(every, "all.json")
    for said in (Request(engine="ddp"), Request(engine="deepspeed", stage=2), Request(stage=2), Request(recompute="full")):
        job = resolve(found.overridden_by(said)).job
        assert estimate(job).peak_bytes > 0
        sure = " ".join(found.how_sure(job))
        assert ("no run confirms this prediction" in sure) == (said.engine is not None)
        assert ("is applied to the blocks" in sure) == (said.recompute is not None)
    assert resolve(found.overridden_by(Request(engine="ddp"))).job.recipe.zero_stage == 0


@pytest.mark.usefixtures("sharded")
def test_the_command_line_names_the_run_that_it_predicts_from(folder: Path):
    from typer.testing import CliRunner

    from zeroplan.cli.app import app

    path = str(folder / "sharded.json")
    asked = CliRunner().invoke(app, ["estimate", "--from-run", path, "--gpus", "64", "--micro-batch", "4", "--json"])
    assert asked.exit_code == 0
    assert "from a run on 8 GPUs with 2 x 128 tokens" in asked.stderr
    answer = json.loads(asked.stdout)
    assert answer["job"]["mesh"]["dp_shard"] == 64
    assert answer["job"]["recipe"]["optimizer_impl"] == "fused"
    assert any("from a run on 8 GPUs" in note for note in answer["notes"])
    advised = CliRunner().invoke(app, ["advise", "--from-run", path, "--seq-len", "4096"])
    assert advised.exit_code == 0, advised.output
    assert "--micro-batch 1" in advised.stdout
    other = CliRunner().invoke(app, ["estimate", "--from-run", path, "--engine", "ddp"])
    assert isinstance(other.exception, SpecError)
    assert "zeroplan dryrun --profile all" in str(other.exception)


def test_what_a_run_cannot_predict_is_refused_in_one_line(own: SavedRun, sharded: SavedRun):
    found = FromRun(own, "own.json")
    with pytest.raises(SpecError, match=r"refuses sequences of 2,048 tokens"):
        found.how_sure(resolve(found.overridden_by(Request(seq_len=4096))).job)
    for general, said in (
        (None, "no profile of its model; run the script again"),
        (ScriptProfile(unknown="it trains 2 models, and a job has only one"), "it trains 2 models"),
    ):
        with pytest.raises(SpecError, match=said):
            FromRun(replace(sharded, general=general), "sharded.json")


def test_a_run_of_a_model_without_blocks_is_saved_without_a_profile(folder: Path):
    run = saved(folder, "plain.json", "--profile", "own", "--", str(SCRIPTS / "ddp.py"), gpus=8)
    assert run.general is not None
    assert "has no list of blocks" in run.general.unknown
    assert run.trace is not None


@pytest.mark.usefixtures("sharded")
def test_the_command_of_a_plan_from_a_run_gives_the_same_peak(folder: Path):
    from typer.testing import CliRunner

    from zeroplan.cli.app import app

    path = str(folder / "sharded.json")
    planned = CliRunner().invoke(app, ["plan", "--from-run", path, "--gpus", "64", "--global-batch", "256", "--json"])
    assert planned.exit_code == 0, planned.output
    answer = json.loads(planned.stdout)
    assert any("from a run on 8 GPUs" in note for note in answer["notes"])
    command = answer["best"]["command"].split()
    assert command[:4] == ["zeroplan", "estimate", "--from-run", path]
    asked = CliRunner().invoke(app, [*command[1:], "--json"])
    best, found = answer["best"], json.loads(asked.stdout)
    assert (found["job"]["recipe"]["engine"], found["job"]["recipe"]["zero_stage"]) == (best["engine"], best["stage"])
    assert found["job"]["batch"]["micro_batch_size"] == best["micro_batch"]
    context, room = 3 * 2**29, 2**26  # the CUDA context and communicators; the plan's rounding
    assert 0 < best["least_bytes"] - found["peak"]["allocated_bytes"] < 2 * context + room
    longest = CliRunner().invoke(app, ["plan", "--from-run", path, "--max-seq", "--json"])
    assert longest.exit_code == 0, longest.output


def test_a_profile_counts_the_flops_of_the_familys_formulas(sharded: SavedRun):
    from zeroplan.resolve import job
    from zeroplan.spec.model import ModelSpec
    from zeroplan.steptime.work import work

    model = ModelSpec(
        family="llama", hidden_size=128, intermediate_size=384, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=8,
        head_dim=16, vocab_size=4096, tie_word_embeddings=False,
    )  # fmt: skip
    traced = resolve(FromRun(sharded, "sharded.json").overridden_by(Request(micro_batch=4, seq_len=768))).job
    known = job(model=model, gpus=8, micro_batch=4, seq_len=768)
    counted, formulas = (work(one.model, one.recipe, one.batch) for one in (traced, known))
    for name in ("blocks_flops", "head_flops"):
        assert getattr(counted, name) == getattr(formulas, name)
    assert counted.core.flops == formulas.core.flops
    assert (
        0.5 < counted.moved.forward / formulas.moved.forward < 2
    )  # the profile counts saved tensors, the formulas every operator
