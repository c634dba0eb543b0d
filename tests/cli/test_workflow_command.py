"""``zeroplan workflow``: its phases as text and as JSON, and its exit codes."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from zeroplan.workflow.options import OPTIONS, WORKFLOWS, flag_of

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cli.command import Run

ASKED = (
    "workflow",
    "grpo",
    "--model",
    "llama-3.1-8b",
    "--gpu",
    "h100",
    "--gpus",
    "8",
    "--engine",
    "fsdp2",
    "--seq-len",
    "2048",
)


def test_text_and_json_have_the_same_phases(run: Run):
    code, text, err = run(*ASKED, "--explain")
    assert code == 0, err
    found = json.loads(run(*ASKED, "--json")[1])
    assert all(one["phase"] in text for one in found["phases"])
    assert found["least_bytes"] > max(one["peak_bytes"] for one in found["phases"])
    assert all(sum(line["bytes"] for line in one["lines"]) == one["peak_bytes"] for one in found["phases"])
    assert "read, not run" in text


def test_a_phase_that_breaks_is_named(run: Run):
    code, text, _ = run(*ASKED, "--vllm-gpu-memory-utilization", "0.9", "--check")
    assert code == 1
    assert "These phases break: " in text
    assert "training step" in text.partition("\n\n")[0]


def test_a_requested_loss_is_counted_or_refused(run: Run):
    job = ("--model", "llama-3.2-1b", "--gpus", "2", "--seq-len", "4096", "--json")
    peak = {}
    for words in ((), ("--loss", "fused"), ("--full-logits",)):
        code, text, err = run("workflow", "sft", *job, *words)
        assert code == 0, err
        peak[words] = max(one["peak_bytes"] for one in json.loads(text)["phases"])
    assert peak["--loss", "fused"] != peak[()] < peak[("--full-logits",)] > peak["--loss", "fused"]
    code, _, err = run("workflow", "dpo", *job, "--loss", "fused")
    assert (code, err) == (2, "zeroplan: --loss fused: the loss of workflow dpo is log-probs; leave --loss out\n")


def test_the_help_of_a_workflow_has_only_its_own_flags(run: Run):
    every = {name: run("workflow", name, "--help")[1] for name in WORKFLOWS}
    for name, option in OPTIONS.items():
        assert [one for one, text in every.items() if f" {flag_of(name, one)[:24]}" in text] == [
            one for one in every if one in option.of
        ]


@pytest.mark.parametrize("words", [(), ("ipo",), ("dpo", "--beta", "1")])
def test_an_unknown_workflow_is_one_line(run: Run, words: tuple[str, ...]):
    code, text, err = run("workflow", *words)
    assert (code, text, err.count("\n")) == (2, "", 1)


def test_wrong_values_are_one_line(run: Run):
    for words in (("--vllm-mode", "none"), ("--beta", "much"), ("--num-generations", "-1")):
        code, text, err = run(*ASKED, *words)
        assert (code, text, err.count("\n")) == (2, "", 1)


def test_a_workflow_doubles_the_pairs_of_a_file_once(run: Run, tmp_path: Path):
    """`workflow dpo` turns each pair into two sequences; for `estimate`, reading the file already does so."""
    data = {
        "model_name_or_path": "Qwen/Qwen2.5-0.5B",
        "per_device_train_batch_size": 3,
        "beta": 0.1,
        "max_length": 64,
        "bf16": True,
        "gradient_checkpointing": False,
    }
    (tmp_path / "dpo.json").write_text(json.dumps(data))
    flags = ["--model", "Qwen/Qwen2.5-0.5B", "--micro-batch", 3, "--seq-len", 64, "--precision", "bf16-mixed", "--engine", "ddp",
             "--stage", "0", "--optimizer-impl", "fused", "--set", "ddp.find_unused_parameters=true"]  # fmt: skip
    of_file, of_flags = (
        json.loads(run("workflow", "dpo", *said, "--json")[1])["phases"]
        for said in (["--from", str(tmp_path / "dpo.json")], flags)
    )
    assert of_file == of_flags


def test_a_loop_counts_the_padding_of_its_trainer(run: Run):
    """TRL pads the two sequences of a pair, verl removes padding, and the user knows whether lengths are equal."""
    job = ("--model", "llama-3.1-8b", "--gpus", "8", "--seq-len", "2048", "--json")

    def training(*words: str) -> int:
        code, text, err = run("workflow", *words, *job)
        assert code == 0, err
        return next(one["peak_bytes"] for one in json.loads(text)["phases"] if one["phase"].startswith(("training", "update")))

    padded, equal = training("dpo"), training("dpo", "--no-padded")
    assert padded == training("dpo", "--padded") > equal
    assert training("sft") == training("sft", "--no-padded")  # one sequence
    assert training("sft", "--micro-batch", "2") == training("sft", "--micro-batch", "2", "--padded")
    verl = ("ppo", "--engine", "fsdp2", "--gpu", "h100", "--micro-batch", "2")
    assert training(*verl) == training(*verl, "--no-padded")


def test_a_picture_of_the_phases(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The picture names every phase and both verdicts. An existing file and --json beside -o are refused."""
    monkeypatch.chdir(tmp_path)
    code, out, err = run(*ASKED, "--vllm-gpu-memory-utilization", "0.9", "-o", "phases.svg")
    assert (code, err) == (0, "")
    assert out.endswith("wrote phases.svg\n")
    drawn = (tmp_path / "phases.svg").read_text()
    for words in ("training step", "rollout", "does not fit", "8 processes", "the GPU's 79.2 GiB"):
        assert words in drawn
    for more, said in (
        ((), "is there already"),
        (("--json",), "leave one of them out"),
        (("--theme", "grey"), "neither light nor dark"),
    ):
        code, _, err = run(*ASKED, "-o", "phases.svg", *more)
        assert (code, err.count("\n")) == (2, 1)
        assert said in err
    code, _, err = run(*ASKED, "--force")
    assert (code, "none is named" in err) == (2, True)
