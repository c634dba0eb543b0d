"""The same job has the same answer, byte for byte: by command line, job file, other program's file, Python, page and agent."""

from __future__ import annotations

import contextlib
import io
import json
import shlex
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
import yaml

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

from tests.catalog.setups.test_automodel import AUTO
from tests.catalog.setups.test_programs import LIT, MEGATRON, NANO, RLHF, SWIFT, TUNE, VERL
from tests.explore.test_server import ask
from zeroplan import estimate, job
from zeroplan.agents.tools import called
from zeroplan.cli.app import main
from zeroplan.estimator import Estimate
from zeroplan.report.payload import estimate_payload
from zeroplan.resolve import Request, resolve
from zeroplan.workflow import loop_of_file

JOBS: dict[str, dict[str, Any]] = {
    "fsdp2": {"model": "llama-3.1-8b", "gpu": "h100-sxm-80gb", "gpus": 8, "stage": 3, "seq_len": 4096, "recompute": "full"},
    "ddp": {"model": "gpt2", "gpu": "l4-24gb", "gpus": 2, "stage": 0, "seq_len": 512, "micro_batch": 2},
    "deepspeed": {"model": "qwen2.5-7b", "gpu": "a100-sxm-80gb", "gpus": 8, "stage": 2, "engine": "deepspeed", "seq_len": 2048},
    "qlora": {"model": "llama-3.1-8b", "gpu": "l4-24gb", "gpus": 1, "seq_len": 1024, "lora_rank": 16, "quantize": "nf4"},
    "megatron": {"model": "llama-3.1-8b", "gpu": "h100-sxm-80gb", "gpus": 8, "stage": 1, "engine": "megatron", "tensor_parallel": 2,
                 "seq_len": 4096},
    "experts": {"model": "qwen3-30b-a3b", "gpu": "h200-sxm-141gb", "gpus": 16, "stage": 3, "expert_parallel": 8, "seq_len": 4096},
}  # fmt: skip
TRL = {"model_name_or_path": "meta-llama/Llama-3.2-1B", "per_device_train_batch_size": 2, "bf16": True, "max_length": 1024}
FILES = {"sft.yaml": TRL | {"packing": True}, "dpo.yaml": TRL | {"loss_type": ["sigmoid"], "fsdp": "full_shard"},
         "grpo.yaml": TRL | {"num_generations": 2}, "swift-dpo.yaml": SWIFT | {"rlhf_type": "dpo"}, "tune.yaml": TUNE,
         "auto.yaml": AUTO, "nano.yaml": NANO, "lit.yaml": LIT, "swift.yaml": SWIFT, "verl.sh": VERL,
         "megatron.sh": MEGATRON, "rlhf.sh": RLHF}  # fmt: skip


def printed(*words: str) -> str:
    return as_text(json.loads(whole(*words, "--json")))


def whole(*words: str) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        main([*words])
    return out.getvalue()


def as_text(payload: object) -> str:
    """Return an answer's bytes without the list of changes, which the page requests later, and without notes on the input."""
    told = json.loads(json.dumps(payload))
    return json.dumps({key: value for key, value in told.items() if key not in ("changes", "notes")}, sort_keys=True)


def of_python(answer: Estimate) -> str:
    return as_text(estimate_payload(answer))


@pytest.mark.parametrize("said", JOBS.values(), ids=JOBS)
def test_a_job_in_flags_a_file_python_the_page_and_an_agent(said: dict[str, Any], port: int, tmp_path: Path):
    flags = [word for key, value in said.items() for word in (f"--{key.replace('_', '-')}", str(value))]
    expected = printed("estimate", *flags)
    assert of_python(estimate(job(**said))) == expected
    (tmp_path / "job.toml").write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in said.items()))
    assert printed("estimate", str(tmp_path / "job.toml")) == expected
    status, body, _ = ask(port, f"/api/answer?{urlencode(said)}")
    assert status == 200
    assert as_text(json.loads(body)["estimate"]) == expected
    agent = called("estimate", {"job": said})
    assert printed(*shlex.split(str(agent["command"]))[1:]) == expected
    assert agent["peak_allocated_bytes"] == json.loads(expected)["peak"]["allocated_bytes"]


@pytest.mark.parametrize("name", FILES)
def test_another_programs_file_with_its_flag_and_in_python_and_written_out(name: str, tmp_path: Path):
    """The complete job, written as a job file, is the same job, and the one that a check and the file's loop count."""
    file, content = tmp_path / name, FILES[name]
    file.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    found = resolve(Request(from_file=str(file), gpu="h100-sxm-80gb"))
    expected = printed("estimate", "--from", str(file), "--gpu", "h100-sxm-80gb")
    assert of_python(estimate(found.job)) == expected
    assert of_python(estimate(job(from_file=str(file), gpu="h100-sxm-80gb"))) == expected
    agent = called("estimate", {"job": {"from_file": str(file), "gpu": "h100-sxm-80gb"}})
    assert agent["peak_allocated_bytes"] == json.loads(expected)["peak"]["allocated_bytes"]
    (tmp_path / "again.json").write_text(json.dumps(json.loads(expected)["job"]))
    again = json.loads(printed("estimate", str(tmp_path / "again.json")))
    assert again == json.loads(expected)  # but for 80 and 80.0 among the GPU's figures
    asked = (str(file), "--gpu", "h100-sxm-80gb")
    checked = json.loads(whole("check", *asked, "--format", "json"))["checks"][0]
    least = estimate(found.job).least_bytes
    assert checked["needed_bytes"] == least if not found.loop else checked["needed_bytes"] >= least
    if found.loop:
        assert of_python(loop_of_file(found.job, found.loop).answer) == expected
        trained = trained_bytes(whole("workflow", str(found.loop["workflow"]), "--from", *asked, "--json"))
        alone = json.loads(expected)["peak"]["allocated_bytes"]
        assert trained == alone if found.loop["workflow"] == "sft" else trained >= alone


def trained_bytes(loop: str) -> int:
    """Return the training phase's peak of a loop's JSON. [bytes]"""
    of_training = ("training step", "update of the actor")
    return next(int(one["peak_bytes"]) for one in json.loads(loop)["phases"] if one["phase"] in of_training)
