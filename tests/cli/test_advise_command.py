"""``zeroplan advise`` proposes single changes in the file's own keys, and each change has the effect that it promises."""

from __future__ import annotations

import json
import re
import tomllib
from typing import TYPE_CHECKING

import pytest

from tests.catalog.setups.test_setups import FSDP, TITAN, TRAINER
from zeroplan import Request, estimate
from zeroplan.advice import advise
from zeroplan.export.setup_words import in_its_words
from zeroplan.resolve import resolve

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cli.command import Run

DEEPSPEED = {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}, "train_micro_batch_size_per_gpu": 4,
             "gradient_accumulation_steps": 1}  # fmt: skip
#: A file, the flags used with it, the proposed change, and the keys that make this change in the file.
CASES = [
    ("args.json", {key: value for key, value in TRAINER.items() if key != "gradient_checkpointing"}, ("--gpus", "8"),
     '"gradient_checkpointing": true', {"gradient_checkpointing": True}),
    ("args.json", TRAINER, ("--gpus", "8"), '"per_device_train_batch_size": 1',
     {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8}),
    ("args.json", TRAINER, ("--gpus", "8"), '"fsdp_config": {"reshard_after_forward": true}',
     {"fsdp": True, "fsdp_config": {"version": 2, "reshard_after_forward": True}}),
    ("ds.json", DEEPSPEED, ("--gpus", "8"), '"zero_optimization.stage": 3', {"zero_optimization": {"stage": 3}}),
    ("ds.json", DEEPSPEED, ("--gpus", "8"), '"zero_optimization.offload_optimizer.device": "cpu"',
     {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "data", "flags", "key", "put"), CASES)
def test_a_proposed_change_has_the_promised_effect(
    run: Run, tmp_path: Path, name: str, data: dict, flags: tuple[str, ...], key: str, put: dict
):
    """With the proposed keys in the file, ``estimate`` gives the memory that ``advise`` promised."""
    file = tmp_path / name
    file.write_text(json.dumps(data))
    asked = (str(file), "--model", "llama-3.1-8b", "--gpu", "a100-sxm-80gb", "--seq-len", "2048", *flags)
    code, out, err = run("advise", *asked, "--json")
    assert (code, err) == (0, "")
    told = next(change for change in json.loads(out)["changes"] if key in change["keys"])
    file.write_text(json.dumps(data | put))
    after = json.loads(run("estimate", "--from", *asked, "--json")[1])
    assert told["least_bytes"] == after["peak"]["allocated_bytes"] + after["outside_allocator"]["expected_bytes"]


def test_changes_that_make_the_job_fit_come_first(run: Run, tmp_path: Path):
    file = tmp_path / "accelerate.yaml"
    file.write_text(FSDP.replace("fsdp_activation_checkpointing: true", "fsdp_offload_params: false"))
    asked = ("advise", str(file), "--model", "llama-3.1-70b", "--gpu", "h100", "--seq-len", "8192")
    code, out, _ = run(*asked)
    assert code == 0
    assert "does not fit NVIDIA H100" in out
    assert "Single changes: first the changes that make the job fit alone, then all others." in out.replace("\n", " ")
    rows = [line for line in out.splitlines() if re.match(r" +[\d.]+ +[\d.]+   \w", line)]
    assert {row[23:33].strip() for row in rows} <= {"fits", "tight", "no fit"}
    assert {row[41] for row in rows} == {"%"}
    assert "fsdp_config.fsdp_activation_checkpointing: true" in out
    found = json.loads(run(*asked, "--json")[1])
    verdicts = [change["fits"] for change in found["changes"]]
    assert verdicts == sorted(verdicts, key=lambda fits: not fits)
    assert all(change["freed_bytes"] > 0 for change in found["changes"])


def test_changes_of_flags_and_job_files_are_flags(run: Run, tmp_path: Path):
    (tmp_path / "job.toml").write_text('model = "gpt2"\ngpus = 8\nmicro_batch = 4\n')
    for asked in (("--model", "gpt2", "--gpus", "8", "--micro-batch", "4"), (str(tmp_path / "job.toml"),)):
        code, out, _ = run("advise", *asked)
        assert code == 0
        assert "--recompute full" in out
        assert "tokens/s per GPU" not in out  # no GPU, no time


def test_changes_of_a_torchtitan_file_are_toml(tmp_path: Path):
    file = tmp_path / "titan.toml"
    file.write_text(TITAN.replace('"full"', '"none"'))
    job = resolve(Request(from_file=str(file), gpus=16, gpu="h100")).job
    words = [in_its_words(job, one.change.job, "torchtitan", {}) for one in advise(job).changes]
    keys = [key for said in words for key in said if not key.startswith("in the training script")]
    assert 'activation_checkpoint.mode = "full"' in keys
    for key in keys:
        tomllib.loads(key)


@pytest.mark.parametrize(
    "said", [{"engine": "deepspeed", "stage": 3, "micro_batch": 2}, {"replicas": 2}, {"engine": "ddp", "stage": 0}]
)
def test_every_change_can_be_written_for_every_program(said: dict):
    job = resolve(Request(model="llama-3.2-1b", gpus=8, gpu="h100", attention="eager", optimizer_impl="foreach", **said)).job
    for one in advise(job).changes:
        assert one.freed_bytes == estimate(job).least_bytes - one.after.least_bytes
        for kind in ("deepspeed", "accelerate", "trainer", "torchtitan", "llama-factory", "axolotl"):
            assert in_its_words(job, one.change.job, kind, {}), (kind, one.change.change)  # type: ignore[arg-type]


def test_broken_and_missing_files_are_refused(run: Run, tmp_path: Path):
    (tmp_path / "bad.json").write_text("{")
    for asked in ((str(tmp_path / "bad.json"),), (str(tmp_path / "none.json"),), ()):
        code, out, err = run("advise", *asked)
        assert (code, out) == (2, "")
        assert err.count("\n") == 1
