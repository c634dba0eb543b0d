"""The planner on the page gives the answer of ``zeroplan plan``, and its layouts can be loaded and run."""

from __future__ import annotations

import contextlib
import io
from dataclasses import replace
from pathlib import Path

import pytest

from tests.explore.test_answers import printed
from zeroplan.cli.app import main
from zeroplan.errors import SpecError, ZeroplanError
from zeroplan.estimator import estimate
from zeroplan.explore.answers import answer_payload, resolved_of
from zeroplan.explore.planning import controls_of, planned_payload
from zeroplan.export.files import TARGETS
from zeroplan.resolve import Request, resolve

EIGHT = {"model": "llama-3.1-8b", "gpu": "h100-sxm-80gb", "gpus": "8", "seq_len": "4096", "stage": "0", "recompute": "full"}
ASKED = {
    "eight": {**EIGHT, "global_batch": "64"},
    "two nodes, headroom": {**EIGHT, "gpus": "16", "objective": "headroom", "global_batch": ""},
    "adapters": {**EIGHT, "lora_rank": "16", "gpus": "2"},
    "quantised": {**EIGHT, "lora_rank": "16", "quantize": "nf4", "gpu": "l4-24gb", "gpus": "1"},
    "nothing fits": {**EIGHT, "model": "llama-3.1-405b", "gpu": "l4-24gb", "gpus": "1"},
    "interleaved": {**EIGHT, "model": "llama-3.1-70b", "gpus": "64", "seq_len": "8192", "global_batch": "64"},
    "by count": {"model": "1e9", "gpu": "a100-sxm-80gb", "gpus": "4", "optimizer": "sgd", "global_batch": "32"},
}


@pytest.mark.parametrize("said", ASKED.values(), ids=ASKED)
def test_a_plan_is_the_command_lines_and_each_layout_is_its_state(said: dict[str, str]):
    found = planned_payload(said)
    assert found["plan"] == printed(str(found["command"]))
    layouts = found["layouts"]
    assert len(layouts) == len(found["plan"]["rivals"]) + (found["plan"]["best"] is not None)  # type: ignore[index, arg-type]
    for layout in layouts:  # type: ignore[attr-defined]
        assert layout["why"]
        if layout["said"] is None:
            assert layout["recompute_layers"] is not None  # which has no control
            continue
        answer = estimate(resolved_of(layout["said"]).job)
        assert answer.least_bytes == layout["least_bytes"]
        assert answer.comfortable_bytes == layout["comfortable_bytes"] or not answer.fits
        assert answer.job.batch.grad_accum_steps == layout["grad_accum"]
    assert found["plan"]["fits"] is (said is not ASKED["nothing fits"])  # type: ignore[index]


def test_what_has_a_flag_without_a_control_cannot_be_loaded():
    asked = Request(model="gpt2", gpu="l4-24gb", gpus=2)
    job = resolve(asked).job
    assert controls_of(job, asked) is not None
    assert controls_of(replace(job, cluster=replace(job.cluster, gpus_per_node=2)), asked) is None
    assert controls_of(replace(job, recipe=replace(job.recipe, sync_every_micro_batch=False)), asked) is None


@pytest.mark.parametrize("target", TARGETS)
def test_layouts_for_a_file_are_those_that_it_can_say(target: str):
    found = planned_payload({**EIGHT, "global_batch": "64", "file": target})
    for layout in found["layouts"]:  # type: ignore[attr-defined]
        if layout["said"] is None:
            assert layout["recompute_layers"] is not None  # which has no control
            continue
        answer = answer_payload(layout["said"])
        (one,) = [one for one in answer["configurations"] if one["target"] == target]  # type: ignore[attr-defined]
        assert (one["refusal"], bool(one["files"])) == ("", True)
        assert answer["stages"]["columns"][layout["stage"]]["needed_bytes"] == layout["least_bytes"]  # type: ignore[index]
    assert str(found["command"]).endswith(f"--emit {target}")


@pytest.mark.parametrize(("said", "why"), [
    ({"model": "gpt2"}, "none is chosen"), ({**EIGHT, "gpus": "8192"}, "8,192 GPUs are more than .* 4,096"),
    ({**EIGHT, "colour": "red"}, "no control"),
    ({**EIGHT, "objective": "cost"}, "choose one of throughput, headroom"), ({**EIGHT, "global_batch": "many"}, "many"),
    ({**EIGHT, "file": "slurm"}, "choose one of deepspeed, accelerate, fsdp2"),
])  # fmt: skip
def test_what_cannot_be_planned_is_one_line(said: dict[str, str], why: str):
    with pytest.raises(ZeroplanError, match=why) as refused:
        planned_payload(said)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(("target", "engine"), [("deepspeed", "deepspeed"), ("accelerate", "fsdp2"), ("fsdp2", "fsdp2")])
def test_a_downloaded_file_is_what_emit_writes(tmp_path: Path, target: str, engine: str):
    said = {"model": "llama-3.2-1b", "gpu": "h100-sxm-80gb", "gpus": "8", "seq_len": "4096", "engine": engine, "stage": "3",
            "micro_batch": "2", "grad_accum": "2"}  # fmt: skip
    option = f"{engine}.{'reduce_dtype=param' if engine == 'fsdp2' else 'contiguous_gradients=true'}"
    flags = str(answer_payload(said)["command"]).split()[2:]
    command = ["plan", *flags, "--recompute", "none", "--optimizer-impl", "foreach", "--set", option]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        main([*command, "--emit", target, "--out", str(tmp_path), "--keep-logits", "no"])
    said |= {"optimizer_impl": "foreach", "set": option}
    (one,) = [one for one in answer_payload(said)["configurations"] if one["target"] == target]  # type: ignore[attr-defined]
    assert one["refusal"] == ""
    assert {file["name"]: file["text"] for file in one["files"]} == {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert one["launch"]


def test_what_has_no_words_for_a_job_says_so():
    said = {**EIGHT, "engine": "ddp"}
    refusals = {one["target"]: one["refusal"] for one in answer_payload(said)["configurations"]}  # type: ignore[attr-defined]
    assert refusals["deepspeed"] == refusals["fsdp2"] == "its engine is ddp"
    assert refusals["accelerate"] == "accelerate does not recompute under DDP"
    assert all(one["refusal"] for one in answer_payload({**EIGHT, "engine": "paper"})["configurations"])  # type: ignore[attr-defined]


def test_options_of_the_engine_are_those_of_set():
    said = {**EIGHT, "stage": "3", "set": "fsdp2.reshard_after_forward=4"}
    shown = answer_payload(said)
    assert "--set fsdp2.reshard_after_forward=4" in str(shown["command"])
    assert shown["estimate"]["job"]["recipe"]["fsdp2"]["reshard_after_forward"] == 4  # type: ignore[index]
    with pytest.raises(SpecError, match="has no option 'colour'"):
        answer_payload({**EIGHT, "set": "fsdp2.colour=red"})
