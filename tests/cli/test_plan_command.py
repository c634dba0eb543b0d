"""``zeroplan plan``: its answer as text, JSON and Markdown, the files that it writes, and the input that it refuses."""

from __future__ import annotations

import json
import re
import shlex
from typing import TYPE_CHECKING

import pytest

from zeroplan.report.plan import _of_table

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cli.command import Run

ASKED = ("plan", "--model", "llama-3.2-1b", "--gpu", "a10-24gb", "--gpus", "8", "--seq-len", "2048", "--global-batch", "64")


def test_the_answer_fits_one_screen(run: Run):
    code, out, err = run(*ASKED, "--tokens", "1e9", "--price-per-gpu-hour", "2")
    assert (code, err) == (0, "")
    for said in ("Best for throughput:", "zeroplan estimate --model llama-3.2-1b", "GiB at the peak", "s for a step",
                 "tokens/s per GPU", "MFU", "days and cost", "Limited by", "Three rankings", "why they are not the best",
                 "--verbose"):  # fmt: skip
        assert said in out, said
    assert len(out.splitlines()) <= 40
    rankings = out.partition("Three rankings")[2].partition("\n\n")[0].splitlines()[1:]
    assert [line.split(":")[0].split(",")[0].strip() for line in rankings if ":" in line] == [
        "fastest",
        "most careful",
        "cheapest",
    ]


TIGHT = ("plan", "--model", "gpt2-xl", "--gpu", "l4", "--gpus", "1", "--seq-len", "1024", "--stage", "0", "--engine", "ddp",
         "--optimizer", "adamw-8bit", "--loss", "full", "--recompute", "full", "--grad-accum", "1", "--micro-batch")  # fmt: skip


def test_a_layout_that_leads_two_rankings_is_named_once(run: Run):
    tight = run(*TIGHT, "10")[1]
    assert "\ntight: the peak fits, but not with the allocator's cache and the margin" in tight
    assert "\n  most careful: the same as fastest\n" in tight


def test_memory_below_zero_is_called_tight():
    assert [line.split() for line in _of_table("ddp", -1, 100.0)] == [["ddp", "tight", "100"]]
    long = list(_of_table("x" * 70, 2**30, 100.0))
    assert [line.split() for line in long] == [["x" * 70], ["1.0", "100"]]


def test_a_layout_whose_replay_runs_out_of_memory_does_not_fit(run: Run):
    """``estimate`` gives the same answer for the same job."""
    code, out, _ = run(*TIGHT, "12")
    assert code == 1
    assert "its peak fits, but in a replay of its requests it runs out of memory" in out
    assert "runs out of\nmemory in the forward" in run("estimate", *TIGHT[1:], "12")[1]


def test_verbose_has_every_part(run: Run):
    out = run(*ASKED, "--tokens", "1e9", "--price-per-gpu-hour", "2", "--verbose")[1]
    for said in ("together, at the peak", "Time of a step", "matrix multiplications", "days and cost", "Limited by",
                 "Time against memory", "Rejected layouts, by rule"):  # fmt: skip
        assert said in out, said
    assert "--verbose" not in out
    front = out.partition("Time against memory")[2].partition("\n\n")[0].partition("\n")[2]
    assert re.fullmatch(r"(  [^\n]+, \d+ x \d+\s+[\d.]+ +[\d,]+\n?)+", front)  # figures come below a long name


def test_the_command_of_the_plan_gives_the_same_memory(run: Run):
    best = json.loads(run(*ASKED, "--json")[1])["best"]
    found = json.loads(run(*shlex.split(best["command"])[1:], "--json")[1])
    outside = found["outside_allocator"]["expected_bytes"]
    assert found["peak"]["allocated_bytes"] + outside == best["least_bytes"]
    assert found["fits"] is True


def test_json_adds_up(run: Run):
    found = json.loads(run(*ASKED, "--json", "--tokens", "1e9", "--price-per-gpu-hour", "2")[1])
    best = found["best"]
    assert sum(part["seconds"] for part in best["parts"]) == pytest.approx(best["step_s"])
    rate = best["tokens_per_s_per_gpu"]
    sharing = best["tensor_parallel"] * best["context_parallel"] * best["pipeline_parallel"]
    assert best["micro_batch"] * best["grad_accum"] * 2048 / best["step_s"] == pytest.approx(rate * sharing)
    assert best["micro_batch"] * best["grad_accum"] * 8 == 64 * sharing
    assert best["days"] == pytest.approx(1e9 / rate / 8 / 86_400)
    assert best["cost"] == pytest.approx(best["days"] * 24 * 8 * 2)
    assert found["front"][0]["tokens_per_s_per_gpu"] == max(one["tokens_per_s_per_gpu"] for one in found["front"])


def test_the_largest_models_command_names_its_size(run: Run):
    asked = ("plan", "--max-params", "--gpu", "a10-24gb", "--gpus", "2", "--engine", "fsdp2", "--seq-len", "1024", "--json")
    found = json.loads(run(*asked)[1])
    command = shlex.split(found["best"]["command"])[1:]
    assert json.loads(run(*command, "--check", "--json")[1])["fits"] is True
    assert f"{int(command[command.index('--params') + 1]):,} parameters" in found["notes"][0]


def test_markdown_has_a_heading_and_the_command(run: Run):
    code, out, _ = run(*ASKED, "--markdown")
    assert code == 0
    assert out.startswith("## ")
    assert "`zeroplan estimate" in out


def test_if_nothing_fits_the_closest_layout_is_shown(run: Run):
    code, out, err = run("plan", "--model", "llama-3.1-70b", "--gpu", "a10-24gb", "--gpus", "2", "--offload-param", "none",
                         "--offload-optimizer", "none")  # fmt: skip
    assert (code, err) == (1, "")
    assert "Nothing fits" in out
    assert "more than the GPU has" in out
    assert "The rule that rejected most:" in out


def test_an_emitted_file_reads_back_with_the_same_memory(run: Run, tmp_path: Path):
    code, out, _ = run(*ASKED, "--emit", "deepspeed", "--out", str(tmp_path), "--json")
    assert code == 0
    best = json.loads(out)["best"]
    path = str(tmp_path / "deepspeed-zeroplan.json")
    back = run("estimate", *ASKED[1:9], "--deepspeed-config", path, "--recompute", best["recompute"], "--json")
    found = json.loads(back[1])
    assert found["peak"]["allocated_bytes"] + found["outside_allocator"]["expected_bytes"] == best["least_bytes"]
    code, _, err = run(*ASKED, "--emit", "deepspeed", "--out", str(tmp_path))
    assert code == 2
    assert "--force" in err
    assert run(*ASKED, "--emit", "deepspeed", "--out", str(tmp_path), "--force")[0] == 0


def test_logits_that_accelerate_returns_are_counted(run: Run, tmp_path: Path):
    held, let_go = (
        json.loads(run(*ASKED, "--emit", "accelerate", "--out", str(tmp_path), "--force", "--json", *more)[1])
        for more in ((), ("--keep-logits", "no"))
    )
    assert "--keep-logits fp32" in held["best"]["command"]
    assert "--keep-logits" not in let_go["best"]["command"]
    assert any("in fp32" in note for note in held["notes"])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--model", "gpt2"), "needs a GPU"),
        (("--gpu", "h100", "--gpus", "8"), "one model"),
        ((*ASKED[1:], "--global-batch", "7", "--engine", "ddp"), "not divisible by 8 GPUs"),
        ((*ASKED[1:], "--global-batch", "many"), "--global-batch 'many'"),
        ((*ASKED[1:], "--micro-batch", "3"), "does not divide"),
        ((*ASKED[1:], "--engine", "ddp", "--stage", "3"), "has no ZeRO stage 3"),
        ((*ASKED[1:], "--engine", "paper"), "ddp, fsdp2 or deepspeed"),
        ((*ASKED[1:], "--tensor-parallel", "3"), "not divisible by --tensor-parallel 3"),
        ((*ASKED[1:], "--engine", "ddp", "--offload-param", "cpu"), "no engine has this combination"),
        ((*ASKED[1:], "--min-gpus"), "leave one of them out"),
        ((*ASKED[1:], "--max-seq"), "leave one of them out"),
        ((*ASKED[1:], "--max-batch"), "leave one of them out"),
        ((*ASKED[1:], "--max-params"), "leave --model out"),
        ((*ASKED[1:-4], "--max-seq", "--objective", "cost"), "five different questions; use one of them"),
        ((*ASKED[1:], "--mfu", "45"), "share of the peak"),
        ((*ASKED[1:], "--mfu", "nan"), "share of the peak"),
        ((*ASKED[1:], "--price-per-gpu-hour", "free"), "not an amount"),
        ((*ASKED[1:], "--objective", "beauty"), "throughput, headroom, cost"),
        ((*ASKED[1:], "--emit", "yaml"), "deepspeed, accelerate, fsdp2, torchtitan, megatron"),
        ((*ASKED[1:], "--force"), "--emit is not given"),
        ((*ASKED[1:], "--emit", "fsdp2", "--out", "/dev/null/below"), "cannot be written to"),
        ((*ASKED[1:], "--emit", "deepspeed", "--engine", "fsdp2"), "its engine is fsdp2"),
        ((*ASKED[1:], "--json", "--markdown"), "choose one"),
        ((*ASKED[1:], "--replicas", "3"), "not divisible by --replicas 3"),
    ],
)
def test_impossible_input_is_one_line(run: Run, arguments: tuple[str, ...], says: str):
    code, out, err = run("plan", *arguments)
    assert (code, out) == (2, "")
    assert says in err
    assert err.count("\n") == 1
