"""``zeroplan check`` prints one row per file, in the format of the program that reads it, and one exit code for all."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree  # noqa: ICN001  a full name

import pytest
import yaml

from tests.cli.command import Run
from zeroplan import Estimate

ROOT = Path(__file__).parents[2]
FITS, TOO_LARGE, NO_JOB = "fits.toml", "large.toml", "none.toml"
GPU = ("--gpu", "h100-sxm-80gb")


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / FITS).write_text('model = "llama-3.1-8b"\ngpus = 8\nstage = 3\nseq_len = 4096\n')
    (tmp_path / TOO_LARGE).write_text('model = "llama-3.1-70b"\ngpus = 8\nstage = 1\n')
    (tmp_path / NO_JOB).write_text("colour = 1\n")
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}))
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(("arguments", "code"), [
    ((FITS, *GPU), 0), ((TOO_LARGE, *GPU), 1), ((FITS, TOO_LARGE, *GPU), 1), ((FITS, TOO_LARGE, NO_JOB, *GPU), 2), ((FITS,), 2),
    (("absent.toml", *GPU), 2), (("--model", "gpt2", "--gpus", "1", "--gpu", "l4-24gb"), 0), ((), 2),
    (("ds.json", "--model", "llama-3.1-8b", "--gpus", "8", *GPU), 0), ((FITS, "--seq-len", "8192", *GPU), 0),
    ((FITS, "--seq-len", "8192", "--careful", *GPU), 1), ((FITS, *GPU, "--format", "pdf"), 2),
])  # fmt: skip
def test_the_exit_code_covers_all_files(run: Run, arguments: tuple[str, ...], code: int):
    assert run("check", *arguments)[0] == code


def test_a_row_has_the_verdict_of_estimate(run: Run):
    _, out, err = run("check", FITS, TOO_LARGE, NO_JOB, *GPU)
    fits, large, none = out.splitlines()
    verdict = " ".join(run("estimate", FITS, *GPU)[1].split("\n\n", 1)[0].split())
    assert fits == f"ok    {FITS}: {verdict} Counted: 1 sequence of 4,096 tokens at a time."
    assert large.startswith(f"FAIL  {TOO_LARGE}: It does not fit")
    assert none.startswith(f"ERROR {NO_JOB}: job file '{NO_JOB}': colour: no such key")
    assert err.startswith("1 of 3 pass; the largest needs 888.50 GiB")


def test_rows_as_json_junit_and_github_annotations(run: Run):
    files = (FITS, TOO_LARGE, NO_JOB, *GPU)
    told = json.loads(run("check", *files, "--format", "json")[1])
    assert [(one["outcome"], one["failed"]) for one in told["checks"]] == [
        ("fits", False),
        ("does not fit", True),
        ("invalid", True),
    ]
    suite = ElementTree.fromstring(run("check", *files, "--format", "junit")[1])  # noqa: S314  our own
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("3", "1", "1")
    assert [[child.tag for child in case] for case in suite] == [["system-out"], ["failure"], ["error"]]
    lines = run("check", *files, "--format", "github")[1].splitlines()
    assert [line.split(",title=zeroplan::")[0] for line in lines] == [
        f"::notice file={FITS}", f"::error file={TOO_LARGE}", f"::error file={NO_JOB}"
    ]  # fmt: skip


def test_a_file_name_cannot_inject_a_github_command(run: Run, tmp_path: Path):
    name = "a,title=x::b%.toml"
    (tmp_path / name).write_text((tmp_path / FITS).read_text())
    (line,) = run("check", name, *GPU, "--format", "github")[1].splitlines()
    assert line.startswith("::notice file=a%2Ctitle=x%3A%3Ab%25.toml,title=zeroplan::It fits")


def test_the_pre_commit_hook_runs_zeroplan_check():
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
    assert (hook["id"], hook["entry"], hook["language"]) == ("zeroplan-check", "zeroplan check", "python")


#: Its peak leaves 64 MiB, but a replay runs out of memory with both settings of the allocator.
RUNS_OUT = ("--model", "llama-3.1-8b", "--gpus", "8", "--gpu", "a100-40gb", "--seq-len", "8192", "--stage", "2",
            "--recompute", "full", "--offload-activations")  # fmt: skip


def test_a_job_whose_replay_runs_out_of_memory_fails_everywhere(run: Run):
    code, out, _ = run("check", *RUNS_OUT)
    assert (code, out.startswith("FAIL  the job: It does not fit")) == (1, True)
    assert "though the peak leaves" in out
    assert "With expandable segments it runs out, too." in out
    code, out, _ = run("estimate", *RUNS_OUT, "--check", "--json")
    assert (code, json.loads(out)["verdict"], json.loads(out)["fits"]) == (1, "does not fit", False)
    before = tuple(one for one in RUNS_OUT if one != "--offload-activations")
    changes = [one["flags"] for one in json.loads(run("estimate", *before, "--json")[1])["changes"]]
    assert changes
    assert "--offload-activations" not in changes


def test_a_job_that_needs_expandable_segments_passes_where_they_are_set(run: Run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Estimate, "fits_in_replay", lambda _, settings: settings == "expandable_segments")
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    assert run("check", FITS, *GPU)[0] == run("estimate", FITS, *GPU, "--check")[0] == 1
    assert json.loads(run("check", FITS, *GPU, "--format", "json")[1])["checks"][0]["outcome"] == "needs expandable segments"
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    assert run("check", FITS, *GPU)[0] == run("estimate", FITS, *GPU, "--check")[0] == 0


@pytest.mark.parametrize(("key", "word"), [("padding_free", "ok "), ("label_smoothing_factor", "ok?")])
def test_keys_that_may_take_memory_and_are_not_counted_make_the_row_doubtful(run: Run, key: str, word: str):
    said = {"per_device_train_batch_size": 1, "bf16": True, key: 0.1 if key == "label_smoothing_factor" else True}
    Path("args.json").write_text(json.dumps(said))
    flags = ("args.json", "--model", "gpt2", "--gpus", "1", "--seq-len", "128", *GPU)
    code, out, _ = run("check", *flags)
    assert (code, out[:3]) == (0, word)
    assert f"not counted: {key}." in out
    assert run("check", *flags, "--careful")[0] == (1 if word == "ok?" else 0)


def test_a_loop_is_judged_with_all_its_phases(run: Run):
    """The training step fits, but not together with DPO's reference model; `estimate` and `workflow` give the same exit code."""
    said = {"model_name_or_path": "meta-llama/Llama-3.2-1B", "per_device_train_batch_size": 1, "max_length": 64, "bf16": True,
            "gradient_checkpointing": True, "beta": 0.1}  # fmt: skip
    Path("dpo.json").write_text(json.dumps(said))
    where = ("--gpu", "l4-24gb", "--gpus", "1")
    code, out, _ = run("check", "dpo.json", *where)
    assert (code, out[:4]) == (1, "FAIL")
    assert "It fits NVIDIA L4" in out
    assert "With all phases of its loop (dpo): It does not fit" in out
    assert (
        run("estimate", "--from", "dpo.json", *where, "--check")[0]
        == run("workflow", "dpo", "--from", "dpo.json", *where, "--check")[0]
        == 1
    )
    row = json.loads(run("check", "dpo.json", *where, "--format", "json")[1])["checks"][0]
    assert row["outcome"] == "does not fit"
    assert row["needed_bytes"] > row["capacity_bytes"]
