"""Dry runs of unmodified scripts as one rank of eight: they need the bytes that `verify` measures, and read correct values."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.dryrun.running import SCRIPTS, dry_run
from zeroplan.measurement import Measurement
from zeroplan.units import KIB, MIB

pytestmark = pytest.mark.torch
pytest.importorskip("transformers")


def test_fsdp2_has_the_memory_that_verify_measures(tmp_path: Path):
    """The peak agrees within 64 bytes, held memory within 16 KiB. The script itself reads memory counters and clips gradients."""
    from tests.simulated import simulate
    from zeroplan.resolve import job
    from zeroplan.spec.model import ModelSpec

    model = ModelSpec(
        family="llama", hidden_size=256, intermediate_size=768, num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=8,
        head_dim=32, vocab_size=4096, tie_word_embeddings=False,
    )  # fmt: skip
    known = job(
        model=model, gpus=8, stage=3, engine="fsdp2", micro_batch=2, seq_len=256, optimizer_impl="fused", gpu="h100-sxm-80gb"
    )
    run = dry_run("--gpus", "8", "--", str(SCRIPTS / "fsdp2.py"), "3", "256", "256", folder=tmp_path)
    oracle = simulate(known).steady
    assert run.peak_bytes == pytest.approx(oracle.peak.peak_bytes, abs=64)
    assert run.answer["steps"][-1]["held_bytes"] == pytest.approx(oracle.held_bytes, abs=2**14)
    kinds = run.answer["steps"][-1]["phases"][1]["kinds"]
    for kind in ("parameters", "optimizer state", "activations", "unsharded parameters", "all-gather buffers"):
        assert kinds[kind] == pytest.approx(oracle.peak.kinds[kind], rel=0.001, abs=2**14), kind


@pytest.mark.parametrize("wrapper", ["ddp", "0", "1", "2", "3"])
def test_ddp_and_deepspeed_have_the_memory_that_verify_measures(tmp_path: Path, wrapper: str):
    """Peak and held memory agree within 64 bytes: DeepSpeed's differ by the bytes of the loss and the norm."""
    if wrapper != "ddp":
        pytest.importorskip("deepspeed")
    from zeroplan.resolve import job
    from zeroplan.spec.model import ModelSpec
    from zeroplan.verify.processes.launch import launch
    from zeroplan.verify.task import Task

    model = ModelSpec(
        family="llama", hidden_size=256, intermediate_size=768, num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=8,
        head_dim=32, vocab_size=4096, tie_word_embeddings=False,
    )  # fmt: skip
    engine, stage = ("ddp", 0) if wrapper == "ddp" else ("deepspeed", int(wrapper))
    known = job(model=model, gpus=8, stage=stage, engine=engine, micro_batch=2, seq_len=256, gpu="h100-sxm-80gb")
    with ThreadPoolExecutor() as pool:
        going = pool.submit(
            dry_run, "--gpus", "8", "--steps", "3", "--", str(SCRIPTS / "plain_loop.py"), wrapper, folder=tmp_path
        )
        records: list[Measurement] = []
        launch(Task(job=known, transport="fake", tensors="fake"), keep=records.append, say=lambda _: None)
        run = going.result()
    oracle = records[-1].steady
    assert len(run.answer["steps"]) == 3
    assert run.peak_bytes == pytest.approx(oracle.peak.peak_bytes, abs=64)
    assert run.answer["steps"][-1]["held_bytes"] == pytest.approx(oracle.held_bytes, abs=64)


def test_ddp_with_a_scaler_takes_its_steps_and_nothing_is_written(tmp_path: Path):
    run = dry_run("--gpus", "8", "--", str(SCRIPTS / "ddp.py"), folder=tmp_path)
    parameters = 4 * (256 * 1024 + 1024 + 2 * 1024 + 1024 * 10 + 10)
    backward, kinds = run.answer["steps"][-1]["phases"][1]["kinds"], run.answer["steps"][-1]["held_kinds"]
    assert kinds["parameters"] == pytest.approx(parameters, rel=0.01)
    assert kinds["optimizer state"] == pytest.approx(2 * parameters, rel=0.01)
    assert backward["reduce buffers"] == pytest.approx(parameters, rel=0.01)
    assert backward["gradients"] == pytest.approx(parameters, rel=0.01)
    assert {one["operation"] for one in run.answer["collectives"]} <= {"all_reduce", "broadcast"}
    assert not list(tmp_path.iterdir())
    replaced = {one["what"]: (one["by"], one["count"]) for one in run.answer["stood_in"]}
    assert replaced["torch.save"] == ("nothing is written", 1)
    assert replaced["the gradient scaler's overflow check"] == ("every step runs", 2)
    assert replaced["data-loading processes"][1] == 1
    assert set(replaced) == {"torch.save", "the gradient scaler's overflow check", "data-loading processes"}


def test_known_values_are_exact_and_unknown_ones_are_listed_with_their_line(tmp_path: Path):
    script = SCRIPTS / "reads_values.py"
    run = dry_run("--", str(script), str(tmp_path / "seen.json"), folder=tmp_path)
    seen = json.loads((tmp_path / "seen.json").read_text())
    assert len(seen) == 2  # the dry run stops the script in the third forward
    assert (seen[0]["kept"], seen[0]["shape"], seen[0]["last"]) == (4 * 28, [112, 100], 11)
    assert (seen[0]["loss"], seen[0]["nan"], seen[0]["finite"], seen[0]["positive"]) == (1.0, False, True, 512)
    assert seen[0]["listed"] == [2, [[4 * 28, 1]]]
    assert seen[0]["overflow"] == [0, 0.0, 0.0]
    assert seen[0]["name"] == "NVIDIA H100 SXM5 80GB"
    in_forward, later = (one["allocated"] for one in seen)
    assert in_forward > 32 * MIB + 2 * 4 * 6400  # torch gives cuBLAS one workspace per thread that multiplies
    assert later > 2 * 32 * MIB + 3 * 4 * 6400
    assert f"| Allocated memory      | {seen[1]['allocated'] // KIB:6d} KiB |" in seen[1]["summary"]
    assert seen[0]["free"]
    assert seen[0]["drawn"] == [4]  # a distribution checks its parameters
    assert "aten::mm" in seen[0]["profiled"]
    assert {one["what"] for one in run.answer["stood_in"]} == {"torch's profiler"}
    made_up = {(one["read"], one["said"]) for one in run.answer["made_up"]}
    assert {
        ("float32", "1.0"),
        ("bool", "True"),
        ("bool", "False"),
        ("a mask as an index", "everything is selected"),
    } <= made_up
    number = 1 + next(at for at, line in enumerate(script.read_text().splitlines()) if "loss.item()" in line)
    assert any(one["line"].startswith("reads_values.py:") and abs(int(one["line"].split(":")[1]) - number) <= 4
               for one in run.answer["made_up"])  # fmt: skip


@pytest.mark.parametrize(
    ("code", "exits", "says"),
    [
        ("raise ValueError('no data')", 2, r"the script raised ValueError at script\.py:1: no data"),
        ("import sys\nsys.exit(3)", 2, "the script exited with code 3"),
        ("print('nothing to train')", 4, "ended without an optimizer step"),
        ("import torch\ntorch.ones(3, device='cuda').nonzero().tolist()\nimport nowhere", 2, "No module named 'nowhere'"),
        ("import torch\ntorch.unique(torch.randn(9, device='cuda'))", 4, r"depends on the values of tensors at script\.py:2"),
        ("import os\nos._exit(7)", 4, "ended without an answer: exit code 7"),
    ],
)
def test_a_script_that_takes_no_step_ends_in_one_line(tmp_path: Path, code: str, exits: int, says: str):
    (tmp_path / "script.py").write_text(code)
    run = dry_run("--", "script.py", folder=tmp_path)
    assert run.code == exits, run.errors
    assert pytest.importorskip("re").search(says, run.last_line), run.last_line
    assert not run.output


def test_an_endless_loop_is_ended_after_the_timeout(tmp_path: Path):
    (tmp_path / "script.py").write_text("while True:\n    pass")
    run = dry_run("--", "script.py", folder=tmp_path, flags=("-q", "--timeout", "5"))
    assert run.code == 4
    assert "within 5 s" in run.last_line


def test_the_answer_fits_a_screen(tmp_path: Path):
    run = dry_run("--gpus", "8", "--", str(SCRIPTS / "ddp.py"), folder=tmp_path, flags=())
    lines = run.output.splitlines()
    assert run.code == 0
    assert lines[0].startswith("Fits: needs ")
    assert "Replaced: data-loading processes" in run.output
    assert max(map(len, lines)) <= 80
    assert len(lines) <= 40


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--gpu", "mi300x"), "not an NVIDIA GPU"),
        (("--gpus", "0"), "0"),
        (("--as-rank", "8", "--gpus", "8"), "--as-rank '8'"),
        (("--steps", "x"), "--steps 'x'"),
        (("--timeout", "-1"), "--timeout '-1'"),
    ],
)
def test_wrong_flags_are_refused_in_one_line(tmp_path: Path, flags: tuple[str, ...], says: str):
    (tmp_path / "train.py").write_text("")
    run = dry_run(*flags, "--", "train.py", folder=tmp_path, flags=())
    assert run.code == 2
    assert says in run.last_line


OWN_GPU = """
import torch
torch.cuda.set_device(3)
model, numbers = torch.nn.Linear(8, 8).cuda(), torch.ones(4, 8)
optimizer = torch.optim.AdamW(model.parameters())
given = numbers.cuda(), numbers.to("cuda"), torch.tensor([[1.0] * 8], device="cuda"), torch.randn(2, 8, device="cuda")
print("on", *{str(one.device) for one in (*given, *model.parameters(), torch.ones(2, dtype=torch.int64).cuda())})
for _ in range(4):
    sum(model(one).sum() for one in given).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_cuda_without_a_number_is_the_device_that_the_script_has_set(tmp_path: Path):
    (tmp_path / "script.py").write_text(OWN_GPU)
    run = dry_run("--gpus", "8", "--as-rank", "3", "--", "script.py", folder=tmp_path, flags=("--json",))
    assert run.answer["ended"] == "steps taken"
    assert "on cuda:3" in run.errors.splitlines()


def test_an_earlier_deepspeed_can_be_imported_without_nvcc():
    """Up to 0.18 DeepSpeed reads nvcc's release when it is imported, to list the kernels that it could build."""
    code = (
        "import types, torch\n"
        "from zeroplan.dryrun.libraries import deepspeed\n"
        "class Missing(Exception): pass\n"
        "def installed(name=''): raise Missing\n"
        "builder = types.SimpleNamespace(installed_cuda_version=installed, MissingCUDAException=Missing)\n"
        "torch.version.cuda = '12.8'\n"
        "deepspeed.patches(None, None)['deepspeed.ops.op_builder.builder'](builder)\n"
        "assert builder.installed_cuda_version() == (12, 8)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.deepspeed
def test_the_all_to_all_of_ulysses_is_a_collective():
    pytest.importorskip("deepspeed", minversion="0.19")
    code = (
        "import torch, torch.distributed as dist\n"
        "from torch.testing._internal.distributed.fake_pg import FakeStore\n"
        "import deepspeed.sequence.layer as layer\n"
        "from zeroplan.dryrun.libraries import deepspeed\n"
        "from zeroplan.verify.watching.collectives import COLLECTIVES, call\n"
        "deepspeed.patches(None, None)['deepspeed.sequence.layer'](layer)\n"
        "dist.init_process_group('fake', store=FakeStore(), rank=0, world_size=4)\n"
        "exchange = torch.ops.deepspeed.dim_zero_all_to_all.default\n"
        "args = torch.empty(8, 2, dtype=torch.bfloat16), dist.group.WORLD.group_name\n"
        "assert exchange in COLLECTIVES\n"
        "assert call(exchange, args, 3) == ('all_to_all', 'bfloat16', 32, 4, 3, 0)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
