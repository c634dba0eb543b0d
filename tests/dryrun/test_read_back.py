"""A script can load the files that it saved in the same dry run, although none is written to the disk."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.dryrun.running import Run, dry_run

pytestmark = pytest.mark.torch
pytest.importorskip("torch")

REAL = """
import argparse, torch
network = torch.nn.Linear(300, 500)
torch.save({"model": network.state_dict(), "epoch": 3}, "real/size.pt")
"""
SCRIPT = """
import argparse, glob, io, os, pathlib, shutil, torch

def resume(path, **options):
    saved = torch.load(path, **options)
    fresh = torch.nn.Linear(300, 500, device="cuda")
    fresh.load_state_dict(saved["model"])
    again = torch.optim.AdamW(fresh.parameters())
    again.load_state_dict(saved["optimizer"])
    assert saved["epoch"] == 3 and {one.shape for one in again.state_dict()["state"][0].values()} == {(), (500, 300)}
    return saved

network = torch.nn.Linear(300, 500, device="cuda")
optimizer = torch.optim.AdamW(network.parameters())
for step in range(3):
    network(torch.ones(4, 300, device="cuda")).sum().backward()
    optimizer.step()
    if step:
        continue
    state = {"model": network.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}
    os.makedirs("out/deep", exist_ok=True)
    torch.save(state, "out/last.tmp")
    os.replace("out/last.tmp", "out/last.pt")
    torch.save(state | {"arguments": argparse.Namespace(lr=1.0)}, pathlib.Path("out/whole.pt"))
    torch.save(state, f="out/deep/old.pt")
    # what lists folders
    assert sorted(os.listdir("out")) == ["deep", "last.pt", "whole.pt"] == sorted(one.name for one in os.scandir("out"))
    assert sorted(glob.glob("out/*.pt")) == ["out/last.pt", "out/whole.pt"] == sorted(map(str, pathlib.Path("out").glob("*.pt")))
    assert sorted(glob.glob("out/**/*.pt", recursive=True))[0] == "out/deep/old.pt"
    assert [files for _, _, files in os.walk("out/deep")] == [["old.pt"]]
    assert os.path.lexists("out/last.pt") and not os.path.isdir("out/last.pt") and os.path.getmtime("out/last.pt") > 1e9
    assert all(one.is_file() and one.stat().st_size > 1e6 for one in os.scandir("out") if one.name != "deep")
    shutil.copytree("out/deep", "copied")
    assert os.listdir("copied") == ["old.pt"]
    # what reads them
    held = torch.cuda.memory_allocated()
    saved = resume("out/last.pt")
    assert torch.cuda.memory_allocated() == held + 3 * (600_064 + 2_048)  # blocks of 512 bytes
    del saved
    assert torch.cuda.memory_allocated() == held
    for options in ({"map_location": "cpu"}, {"weights_only": False}, {"mmap": True, "map_location": "cpu"}):
        resume("copied/old.pt", **options)
    assert resume("out/whole.pt", weights_only=False)["arguments"].lr == 1.0
    try:
        torch.load("out/whole.pt")
    except Exception as error:
        assert "Namespace" in str(error)
    with open("out/last.pt", "rb") as file:
        resume(file)
    with open("through.pt", "wb") as file:
        torch.save(state, file)
    assert os.path.getsize("through.pt") > 3 * 602_000 and resume("through.pt")
    os.replace("through.pt", "moved.pt")
    assert not os.path.exists("through.pt") and resume("moved.pt")
    os.remove("moved.pt")
    assert not os.path.exists("moved.pt")
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    resume(buffer)
    torch.save(torch.nn.Linear(300, 500), "module.pt")
    assert torch.load("module.pt", weights_only=False).weight.shape == (500, 300)
    host = torch.nn.Linear(300, 500)
    torch.save({"model": host.state_dict(), "epoch": 3}, "size.pt")
    assert os.path.getsize("size.pt") == os.path.getsize("real/size.pt")
    with open("size.pt", "w") as file:
        file.write("its own")
    assert open("size.pt").read() == "its own" and os.path.getsize("size.pt") == 7
    print("read all")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("read_back")
    (made / "real").mkdir()
    subprocess.run([sys.executable, "-c", REAL], cwd=made, check=True, capture_output=True)
    (made / "script.py").write_text(SCRIPT)
    return made


@pytest.fixture(scope="module")
def run(folder: Path) -> Run:
    return dry_run("--", "script.py", folder=folder, flags=("--json",))


def test_a_script_resumes_from_what_it_saved(run: Run):
    assert run.answer["ended"] == "steps taken"
    assert run.errors.count("read all") == 1
    assert "reading of saved files" in {one["what"] for one in run.answer["stood_in"]}


def test_no_saved_file_is_on_the_disk(run: Run, folder: Path):
    assert run.code == 0
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert files == {"script.py", "real/size.pt", "size.pt"}
    assert (folder / "size.pt").read_text() == "its own"


SHARDED = """
import os, torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
dist.init_process_group("nccl")
network = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)).cuda()
fully_shard(network)
optimizer = torch.optim.AdamW(network.parameters())
class Whole:
    def state_dict(self):
        self.seen = get_state_dict(network, optimizer)
        return {"model": self.seen[0], "optimizer": self.seen[1]}
    def load_state_dict(self, state):
        set_state_dict(network, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        print("loaded all")
for step in range(3):
    network(torch.ones(4, 64, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    if step:
        continue
    torch.save(network.state_dict(), "shard.pt")
    network.load_state_dict(torch.load("shard.pt"))
    dcp.save({"all": Whole()}, checkpoint_id="step1")
    assert os.path.isdir("step1") and ".metadata" in os.listdir("step1")
    dcp.load({"all": Whole()}, checkpoint_id="step1")
    dcp.async_save({"model": network.state_dict()}, storage_writer=dcp.FileSystemWriter("step2")).result()
    dcp.load({"model": network.state_dict()}, storage_reader=dcp.FileSystemReader("step2"))
    print("saved all")
"""


def test_shards_and_distributed_checkpoints_are_loaded_again(tmp_path: Path):
    (tmp_path / "sharded.py").write_text(SHARDED)
    run = dry_run("--gpus", "4", "--", "sharded.py", folder=tmp_path, flags=("--json",))
    assert run.answer["ended"] == "steps taken"
    assert (run.errors.count("loaded all"), run.errors.count("saved all")) == (1, 1)
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "sharded.py"]


PRETRAINED = """
import os, torch
from transformers import LlamaConfig, LlamaForCausalLM
config = LlamaConfig(hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=64)
model = LlamaForCausalLM(config).cuda()
optimizer = torch.optim.SGD(model.parameters())
tokens = torch.zeros(1, 8, dtype=torch.int64, device="cuda")
for step in range(3):
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    if not step:
        for size in ("5GB", "50KB"):
            model.save_pretrained("out" + size, max_shard_size=size)
            again = LlamaForCausalLM.from_pretrained("out" + size, dtype=torch.bfloat16)
            assert {one.dtype for one in again.parameters()} == {torch.bfloat16}
        print("safetensors", len([one for one in os.listdir("out5GB") if one.endswith(".safetensors")]),
              len([one for one in os.listdir("out50KB") if one.endswith(".safetensors")]) > 1)
"""


@pytest.mark.skipif(find_spec("transformers") is None, reason="no transformers")
def test_a_pretrained_model_is_loaded_from_where_it_was_saved(tmp_path: Path):
    (tmp_path / "pretrained.py").write_text(PRETRAINED)
    run = dry_run("--", "pretrained.py", folder=tmp_path, flags=("--json",))
    assert run.answer["ended"] == "steps taken"
    assert "safetensors 1 True" in run.errors
    assert not list(tmp_path.rglob("*.safetensors"))


KEPT_OUT = """
import torch
network = torch.nn.Linear(64, 64, device="cuda")
optimizer = torch.optim.AdamW(network.parameters())
network(torch.ones(4, 64, device="cuda")).sum().backward()
optimizer.step()
torch.save({"model": network.state_dict(), "not to be pickled": lambda: 1}, "last.pt")
torch.load("last.pt")
"""


def test_loading_a_file_with_an_unpicklable_object_ends_in_one_line(tmp_path: Path):
    (tmp_path / "script.py").write_text(KEPT_OUT)
    run = dry_run("--", "script.py", folder=tmp_path)
    assert run.code == 4
    assert "last.pt was saved in this run" in run.last_line
    assert "a checkpoint from before the run" in run.last_line


MODEL = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM
config = LlamaConfig(hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, vocab_size=512)
model = LlamaForCausalLM(config)
batch = torch.zeros(2, 32, dtype=torch.int64, device="cuda")
"""
ACCELERATE = """
from accelerate import Accelerator
accelerator = Accelerator(mixed_precision="bf16")
optimizer = torch.optim.AdamW(model.parameters())
model, optimizer = accelerator.prepare(model, optimizer)
for step in range(4):
    accelerator.backward(model(input_ids=batch, labels=batch).loss)
    optimizer.step()
    optimizer.zero_grad()
    if not step:
        accelerator.save_state("state")
        accelerator.load_state("state")
        print("resumed")
"""
DEEPSPEED = """
import deepspeed
settings = {
    "train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": True}, "zero_optimization": {"stage": 3},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
}
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)
for step in range(4):
    engine.backward(engine(input_ids=batch, labels=batch).loss)
    engine.step()
    if not step:
        engine.save_checkpoint("state")
        path, _ = engine.load_checkpoint("state")
        assert path is not None
        print("resumed")
"""
TRAINER = """
import os
from transformers import Trainer, TrainingArguments
rows = [{"input_ids": one, "labels": one} for one in batch.cpu().repeat(8, 1)]
arguments = TrainingArguments("state", per_device_train_batch_size=2, max_steps=1, save_steps=1, report_to=[], bf16=True)
Trainer(model, arguments, train_dataset=rows).train()
assert os.listdir("state") == ["checkpoint-1"]
arguments.max_steps = 3
Trainer(model, arguments, train_dataset=rows).train(resume_from_checkpoint=True)
print("resumed")
"""


@pytest.mark.skipif(find_spec("transformers") is None, reason="no transformers")
@pytest.mark.parametrize(("library", "code"), [("accelerate", ACCELERATE), ("deepspeed", DEEPSPEED), ("accelerate", TRAINER)])
def test_a_script_resumes_from_its_librarys_checkpoint(tmp_path: Path, library: str, code: str):
    pytest.importorskip(library)
    (tmp_path / "script.py").write_text(MODEL + code)
    gpus = () if code is TRAINER else ("--gpus", "4")
    run = dry_run(*gpus, "--", "script.py", folder=tmp_path, flags=("--json", "--until-end"))
    assert run.answer["steps"]
    assert "resumed" in run.errors.splitlines()
