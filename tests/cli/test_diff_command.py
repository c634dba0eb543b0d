"""``zeroplan diff``: two files, flags for both, flags for B after ``--``, a limit for CI, and wrong files."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.docs.pages import CONFIG
from tests.measured_twins import twin
from tests.snapshots.written import Written, step
from zeroplan.verify.record import write_record

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cli.command import Run

JOB = ("--model", "gpt2", "--gpus", "4", "--seq-len", "256")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the current folder, which has a file of each type."""
    (tmp_path / "job.toml").write_text('model = "gpt2"\ngpus = 4\nstage = 3\nseq-len = 256\n')
    (tmp_path / "other.toml").write_text('model = "gpt2"\ngpus = 8\nstage = 3\nseq-len = 256\n')
    (tmp_path / "ds.json").write_text('{"bf16": {"enabled": true}, "zero_optimization": {"stage": 2}}')
    card = Written()
    step(card, states=True)
    card.to(tmp_path / "snapshot.pickle")
    write_record(twin(), tmp_path).rename(tmp_path / "record.json")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("here")
def test_flags_after_two_dashes_are_those_of_b(run: Run):
    code, out, err = run("diff", "job.toml", "--", "--stage", "2")
    assert (code, err) == (0, "")
    assert "\nB  A with --stage 2: gpt2 on 4 GPUs, ZeRO stage 2: FSDP2, " in out
    assert "\nSettings: stage 3 -> 2\n" in out
    assert "blocks unsharded until their backward" in run("diff", "-v", "job.toml", "--", "--stage", "2")[1]


@pytest.mark.usefixtures("here")
def test_two_lists_of_flags_need_no_file(run: Run):
    code, out, _ = run("diff", *JOB, "--set", "fsdp2.reduce_dtype=param", "--", "--set", "fsdp2.reshard_after_forward=false")
    assert code == 0
    assert "\nSettings: fsdp2.reshard_after_forward not set -> no\n" in out
    assert "\nA  gpt2 on 4 GPUs, ZeRO stage 3: FSDP2\n" in out


@pytest.mark.usefixtures("here")
def test_flags_apply_to_both_files_and_those_after_two_dashes_to_the_second(run: Run):
    _, out, _ = run("diff", "job.toml", "other.toml", "--recompute", "full", "--", "--micro-batch", "2")
    assert "\nSettings: gpus 4 -> 8; micro_batch 1 -> 2\n" in out
    assert "\nB  other.toml with --micro-batch 2: gpt2 on 8 GPUs" in out
    payload = json.loads(run("diff", "job.toml", "ds.json", *JOB, "--stage", "2", "--json")[1])
    assert {"engine"} <= {one["name"] for one in payload["settings"]} <= {"engine", "deepspeed.overlap_comm", "optimizer_impl"}


def test_another_model_replaces_the_model_as_a_whole(run: Run, here: Path):
    (here / "config.json").write_text(json.dumps(CONFIG))
    out = run("diff", *JOB, "--", "--config", "config.json")[1]
    assert "\nSettings: model gpt2 -> " in out
    assert "\nSettings: model gpt2 -> " in run("diff", "job.toml", "--", "--config", "config.json")[1]


@pytest.mark.usefixtures("here")
def test_a_catalogue_before_the_dashes_is_also_that_of_b(run: Run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ZEROPLAN_CATALOG", "nowhere")
    code, _, err = run("diff", *JOB, "--catalog", ".", "--", "--stage", "2")
    assert (code, err) == (0, "")
    assert "elsewhere" in run("diff", *JOB, "--catalog", ".", "--", "--catalog", "elsewhere")[2]


@pytest.mark.usefixtures("here")
def test_a_measurement_is_compared_with_the_job_of_the_flags(run: Run):
    for name in ("record.json", "snapshot.pickle"):
        payload = json.loads(run("diff", name, *JOB, "--json")[1])
        assert (payload["before"]["is_a"], payload["after"]["name"]) == ("estimate", name)
        assert payload["compared_by"] == "kind"
    out = run("diff", "job.toml", "record.json")[1]
    assert "Note: B was measured on cpu tensors" in out


def test_flags_apply_to_a_saved_answer_as_to_its_job(run: Run, here: Path):
    (here / "a.json").write_text(run("estimate", "job.toml", "--json")[1])
    assert "A and B are equal in everything that both contain" in run("diff", "a.json", "job.toml")[1]
    changed = json.loads(run("diff", "a.json", "--json", "--", "--gpus", "8")[1])
    assert [one["name"] for one in changed["settings"]] == ["gpus"]
    assert json.loads(run("diff", "a.json", "other.toml", "--gpus", "8", "--json")[1])["equal"]


@pytest.mark.usefixtures("here")
def test_fail_above_sets_the_exit_code(run: Run):
    code, out, _ = run("diff", "job.toml", "--fail-above", "1%", "--", "--micro-batch", "4")
    assert code == 1
    assert "\nThat is more than 1 % (--fail-above).\n" in out
    for limit in ("900%", "9"):
        code, out, _ = run("diff", "job.toml", "--fail-above", limit, "--", "--micro-batch", "4")
        assert code == 0
        assert "It is not higher by more than 900 %" in out
    code, out, _ = run("diff", "job.toml", "--fail-above", "0", "--json", "--", "--micro-batch", "4")
    assert (code, json.loads(out)["fail_above"]) == (1, {"limit": 0.0, "failed": True})
    assert run("diff", "job.toml", "job.toml", "--fail-above", "0")[0] == 0
    assert run("diff", "other.toml", "job.toml", "--fail-above", "0")[0] == 1  # fewer GPUs share the states
    assert run("diff", "job.toml", "other.toml", "--fail-above", "0")[0] == 0


@pytest.mark.usefixtures("here")
def test_the_json_has_the_keys_that_scripts_rely_on(run: Run):
    payload = json.loads(run("diff", "job.toml", "other.toml", "--json")[1])
    assert payload.keys() == {
        "schema_version", "equal", "compared_by", "before", "after", "peak", "changes", "kinds", "same_moments", "held",
        "collectives", "totals", "settings", "notes", "fail_above",
    }  # fmt: skip
    assert payload["peak"]["change_bytes"] == sum(row["change_bytes"] for row in payload["changes"])
    assert payload["changes"][0].keys() == {"kind", "what", "happened", "before_bytes", "after_bytes", "change_bytes"}
    assert payload["before"].keys() == {
        "name", "is_a", "verdict", "step_s", "tokens_per_s", "moment", "phase", "allocated_bytes",
    }  # fmt: skip


@pytest.mark.usefixtures("here")
def test_with_a_gpu_both_times_are_those_of_the_time_command(run: Run):
    changed = ("--recompute", "full")
    before, after = (
        json.loads(run("time", "job.toml", "--gpu", "h100", "--json", *also)[1])["step_s"] for also in ((), changed)
    )
    out = run("diff", "job.toml", "--gpu", "h100", "--", *changed)[1]
    assert f"A step takes {before:.3g} s -> {after:.3g} s ({100 * (after / before - 1):+.1f} %)" in out
    payload = json.loads(run("diff", "job.toml", "--gpu", "h100", "--json", "--", *changed)[1])
    assert [payload[side]["step_s"] for side in ("before", "after")] == [before, after]
    assert "A step takes" not in run("diff", "job.toml", "--", *changed)[1]


@pytest.mark.usefixtures("here")
def test_markdown_and_units(run: Run):
    out = run("diff", "job.toml", "other.toml", "--markdown")[1]
    assert "| setting | A | B |\n|---|---|---|\n| gpus | 4 | 8 |\n" in out
    assert " MB  " in run("diff", "job.toml", "other.toml", "--unit", "gb")[1]
    sizes = run("diff", "snapshot.pickle", "snapshot.pickle", "--markdown")[1]
    assert sizes.startswith("**A and B are equal")


@pytest.mark.parametrize(("arguments", "said"), [
    ((), "diff compares two; give two files"), (("job.toml",), "diff compares two"), (("job.toml", *JOB), "diff compares two"),
    (JOB, "diff compares two"), (("a", "b", "c"), "these are 3 files"), (("job.toml", "gpt2"), "does not exist"),
    (("job.toml", "."), "is not a file"), (("record.json", "--", "--stage", "2"), "is a record, which flags do not change"),
    (("record.json", "snapshot.pickle", "--stage", "2"), "flags of a job change nothing of record.json and snapshot.pickle"),
    (("job.toml", "--", "--json"), "--json is not a flag of a job"), (("job.toml", "--", "--stag", "2"), "No such option: --stag"),
    (("job.toml", "--", "--stage", "2", "more"), "extra argument"), (("job.toml", "--", "--stage", "7"), "stage"),
    (("job.toml", "other.toml", "--fail-above", "much"), "is not a fraction"),
    (("job.toml", "other.toml", "--fail-above", "-1"), "is not a fraction"),
    (("job.toml", "other.toml", "--fail-above", "nan"), "is not a fraction"),
    (("job.toml", "other.toml", "--json", "--markdown"), "choose one"), (("job.toml", "other.toml", "--unit", "mb"), "--unit"),
    (("ds.json", "job.toml"), "--model"), (("--", "--stage", "2", "--", "--stage", "3"), "-- is there twice"),
])  # fmt: skip
@pytest.mark.usefixtures("here")
def test_wrong_input_is_one_line_and_exit_code_2(run: Run, arguments: tuple[str, ...], said: str):
    code, out, err = run("diff", *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("zeroplan: ")
    assert said in err
    assert len(err.splitlines()) == 1


def test_control_characters_of_a_file_do_not_reach_the_terminal(run: Run, here: Path):
    answer = json.loads(run("estimate", "job.toml", "--json")[1])
    answer["peak"]["lines"][0]["reason"] = "\x1b[2Jcleared"
    (here / "a.json").write_text(json.dumps(answer))
    for flag in ((), ("-v",), ("--markdown",)):
        out = run("diff", "a.json", "job.toml", *flag)[1]
        assert "\x1b" not in out
        assert "cleared" in out


@pytest.mark.usefixtures("here")
def test_files_are_compared_without_torch_and_numpy():
    code = (
        "import sys\nfrom zeroplan.cli.app import main\ntry:\n    main(sys.argv[1:])\n"
        "except SystemExit as end:\n    assert not end.code\n"
        "print(sorted({'torch', 'transformers', 'deepspeed', 'numpy', 'rich'} & set(sys.modules)), file=sys.stderr)"
    )
    words = [sys.executable, "-c", code, "diff", "job.toml", "snapshot.pickle"]
    assert subprocess.run(words, capture_output=True, text=True, check=True).stderr.strip() == "[]"
