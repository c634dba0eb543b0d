"""``zeroplan workflow``: the phases as text and as JSON, and its exit codes."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from zeroplan.workflow.asked import OPTIONS, WORKFLOWS, flag_of

if TYPE_CHECKING:
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


def test_help_has_the_flags_of_the_workflow_alone(run: Run):
    every = {name: run("workflow", name, "--help")[1] for name in WORKFLOWS}
    for name, option in OPTIONS.items():
        assert [one for one, text in every.items() if f" {flag_of(name, one)[:24]}" in text] == [
            one for one in every if one in option.of
        ]


@pytest.mark.parametrize("words", [(), ("ipo",), ("dpo", "--beta", "1")])
def test_a_workflow_that_is_none_ends_in_a_line(run: Run, words: tuple[str, ...]):
    code, text, err = run("workflow", *words)
    assert (code, text, err.count("\n")) == (2, "", 1)


def test_wrong_words_end_in_a_line(run: Run):
    for words in (("--vllm-mode", "none"), ("--beta", "much"), ("--num-generations", "-1")):
        code, text, err = run(*ASKED, *words)
        assert (code, text, err.count("\n")) == (2, "", 1)
