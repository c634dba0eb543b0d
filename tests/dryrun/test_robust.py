"""Dry runs of difficult scripts: own threads, ranks and processes, several optimizers, old checkpoints, a catch-all ``except``."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.dryrun.running import dry_run

pytestmark = pytest.mark.torch
pytest.importorskip("torch")

TRAIN = """
import os, sys, torch
from torch import nn

def model():
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 8))

def train(model, n=4, batches=None):
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(n):
        model(batches() if batches else torch.randn(16, 64, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""
ENDS = {
    "threads": """
import queue, threading
batches = queue.Queue(2)
def fill():
    while True:
        batches.put(torch.randn(16, 64).cuda(non_blocking=True))
threading.Thread(target=fill, daemon=True).start()
trainer = threading.Thread(target=train, args=(model().cuda(), 100000, batches.get))
trainer.start()
trainer.join()
""",
    "catches everything": """
network = model().cuda()
optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
while True:
    try:
        network(torch.randn(16, 64, device="cuda")).sum().backward()
        optimizer.step()
    except BaseException:
        continue
""",
    "leaves in a finally": """
try:
    train(model().cuda())
finally:
    sys.exit(1)
""",
    "compiles, averages, accumulates": """
from torch.optim.swa_utils import AveragedModel
@torch.compile(mode="max-autotune")
def gelu(x):
    return x * torch.sigmoid(1.702 * x)
network = torch.compile(model().cuda())
average = AveragedModel(network)
optimizer = torch.optim.AdamW(network.parameters())
for step in range(40):
    gelu(network(torch.randn(16, 64, device="cuda"))).sum().backward()
    if step % 4 == 3:
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(network)
""",
    "LBFGS": """
network, batch = model().cuda(), torch.randn(16, 64, device="cuda")
optimizer = torch.optim.LBFGS(network.parameters(), max_iter=3)
def closure():
    optimizer.zero_grad()
    loss = network(batch).square().mean()
    loss.backward()
    return loss
for _ in range(4):
    print(float(optimizer.step(closure)))
""",
    "gradients of each sample": """
from torch.func import functional_call, grad, vmap
network = model().cuda()
optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
def loss_of(weights, row):
    return functional_call(network, weights, (row,)).sum()
for _ in range(4):
    weights = {name: one.detach() for name, one in network.named_parameters()}
    gradients = vmap(grad(loss_of), (None, 0))(weights, torch.randn(16, 64, device="cuda"))
    for name, one in network.named_parameters():
        one.grad = gradients[name].mean(0)
    optimizer.step()
""",
}


@pytest.mark.parametrize("code", ENDS.values(), ids=ENDS)
def test_an_unusual_script_is_stopped_after_its_steps(tmp_path: Path, code: str):
    (tmp_path / "script.py").write_text(TRAIN + code)
    run = dry_run("--", "script.py", folder=tmp_path, flags=("--json", "-q", "--timeout", "100"))
    assert (run.answer["ended"], len(run.answer["steps"])) == ("steps taken", 2)
    assert any(one["what"].startswith("torch.compile") for one in run.answer["stood_in"]) == ("torch.compile" in code)


def test_ranks_share_the_statistics_of_synced_norms(tmp_path: Path):
    """Each rank sends mean, root and count of 8 channels, and in the backward two sums of each."""
    code = """
torch.distributed.init_process_group("nccl")
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
network = nn.SyncBatchNorm.convert_sync_batchnorm(network).cuda()
train(network, 4, lambda: torch.randn(16, 3, 10, 10, device="cuda"))
"""
    (tmp_path / "script.py").write_text(TRAIN + code)
    answer = dry_run("--gpus", "8", "--", "script.py", folder=tmp_path).answer
    sent = {(one["operation"], one["phase"]): one["n_bytes"] for one in answer["collectives"]}
    assert sent == {("all_gather", "forward"): 8 * 4 * (2 * 8 + 1), ("all_reduce", "backward"): 4 * 2 * 8}
    images, results, weights = 4 * 16 * 3 * 100, 4 * 16 * 8 * 64, 4 * (8 * 27 + 3 * 8)
    forward = answer["steps"][-1]["phases"][0]["peak_bytes"]
    assert forward == pytest.approx(images + 3 * results + 3 * weights, abs=2000)  # and the statistics


def test_steps_of_a_model_in_evaluation_mode_count_as_training(tmp_path: Path):
    """``from_pretrained`` returns a model in evaluation mode. Held memory is counted even if the script ended by itself."""
    (tmp_path / "script.py").write_text(TRAIN + "train(model().cuda().eval(), int(sys.argv[1]))\n")
    by_itself, stopped = (dry_run("--", "script.py", n, folder=tmp_path).answer for n in ("2", "9"))
    assert (by_itself["ended"], stopped["ended"]) == ("script ended", "steps taken")
    last, other = by_itself["steps"][-1], stopped["steps"][-1]
    assert [phase["phase"] for phase in last["phases"]] == [phase["phase"] for phase in other["phases"]]
    weights, batch = 4 * (64 * 128 + 128 + 128 * 8 + 8), 4 * 16 * 64
    assert (last["held_bytes"], other["held_bytes"]) == (3 * weights, 3 * weights + batch)  # it was stopped with the next batch


def test_every_optimizer_takes_its_steps(tmp_path: Path):
    """Each optimizer of a GAN takes two steps, so that the states of both are counted."""
    code = """
makes, judges = model().cuda(), nn.Linear(8, 1).cuda()
first, second = (torch.optim.AdamW(one.parameters()) for one in (judges, makes))
for _ in range(9):
    fake = makes(torch.randn(16, 64, device="cuda"))
    judges(fake.detach()).sum().backward()
    first.step()
    first.zero_grad()
    judges(fake).sum().backward()
    second.step()
    second.zero_grad()
"""
    (tmp_path / "script.py").write_text(TRAIN + code)
    run = dry_run("--", "script.py", folder=tmp_path)
    parameters = (64 * 128 + 128) + (128 * 8 + 8) + (8 + 1)
    assert len(run.answer["steps"]) == 4
    assert run.answer["steps"][-1]["held_kinds"]["optimizer state"] == pytest.approx(8 * parameters, rel=0.05)


SPAWN = """
import torch.distributed as dist
import torch.multiprocessing as mp
def main(rank, ranks, word):
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="1234")
    dist.init_process_group("nccl", rank=rank, world_size=ranks)
    torch.cuda.set_device(rank)
    print(word, rank, "of", ranks)
    train(nn.parallel.DistributedDataParallel(model().to(rank), device_ids=[rank]))
def alone(rank, ranks):
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="1234")
    dist.init_process_group("nccl", rank=rank, world_size=ranks)
if __name__ == "__main__":
    mp.spawn(alone, args=(torch.cuda.device_count(),), nprocs=torch.cuda.device_count())  # its group goes with its processes
    mp.spawn(main, args=(torch.cuda.device_count(), "rank"), nprocs=torch.cuda.device_count())
"""
NOTEBOOK = """
from accelerate import Accelerator, notebook_launcher
def main(word):
    accelerator = Accelerator()
    print(word, accelerator.process_index, "of", accelerator.num_processes)
    network = model()
    network, optimizer = accelerator.prepare(network, torch.optim.AdamW(network.parameters()))
    for _ in range(4):
        accelerator.backward(network(torch.randn(16, 64, device=accelerator.device)).sum())
        optimizer.step()
        optimizer.zero_grad()
notebook_launcher(main, ("rank",), num_processes=8)
"""


@pytest.mark.parametrize("code", [SPAWN, NOTEBOOK], ids=["spawn", "notebook"])
def test_a_script_that_starts_its_own_ranks_runs_as_one_rank(tmp_path: Path, code: str):
    if "accelerate" in code:
        pytest.importorskip("accelerate")
    (tmp_path / "script.py").write_text(TRAIN + code)
    run = dry_run("--gpus", "8", "--as-rank", "3", "--", "script.py", folder=tmp_path, flags=("--json",))
    assert "rank 3 of 8" in run.errors
    assert {one["operation"] for one in run.answer["collectives"]} >= {"all_reduce"}


def test_processes_of_a_script_are_ended_and_input_gets_an_eof(tmp_path: Path):
    code = f"""
import subprocess
for own_session in (False, True):
    subprocess.Popen(["sleep", "{os.getpid()}0"], start_new_session=own_session)
try:
    input("name of the run? ")
except EOFError:
    print("no answer")
network = model().cuda().eval()
with torch.no_grad():
    print(network(torch.randn(1600, 64, device="cuda")).mean().item())
train(network.train())
"""
    (tmp_path / "script.py").write_text(TRAIN + code)
    run = dry_run("--", "script.py", folder=tmp_path, flags=("--json",))
    assert "no answer" in run.errors
    assert run.answer["initialisation"]["peak_bytes"] > 4 * 1600 * 64
    assert not _running(f"{os.getpid()}0")


def _running(word: str) -> list[str]:
    lines = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    return [line.decode() for line in lines if line.startswith(b"sleep\0" + word.encode())]


def test_an_interrupt_ends_the_run_and_leaves_no_files(tmp_path: Path):
    (tmp_path / "script.py").write_text("import time\nprint('ready', flush=True)\ntime.sleep(600)\n")
    command = [sys.executable, "-m", "zeroplan", "dryrun", "--", "script.py"]
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509  a shell's background jobs ignore it
    ) as process:  # fmt: skip
        assert process.stderr is not None
        assert any("ready" in line for line in iter(process.stderr.readline, ""))
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=300)
    assert process.returncode == 130
    assert not output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["script.py"]


OLD = """
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
network = nn.Linear(2048, 2048)
optimizer = torch.optim.AdamW(network.parameters())
network(torch.randn(2, 2048)).sum().backward()
optimizer.step()
torch.save({"model": network.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}, "old.pt")
dcp.save({"model": network.state_dict()}, checkpoint_id="old")
"""
LOADS = """
import json, torch.distributed as dist, torch.distributed.checkpoint as dcp
def read():
    return int(open("/proc/self/io").read().split()[1])
before = read()
for options in ({"map_location": "cpu"}, {"map_location": "cuda:0", "weights_only": False}, {"map_location": "cpu", "mmap": True}):
    saved = torch.load("old.pt", **options)
network = nn.Linear(2048, 2048).cuda()
network.load_state_dict(saved["model"])
optimizer = torch.optim.AdamW(network.parameters())
optimizer.load_state_dict(saved["optimizer"])
dist.init_process_group("nccl")
again = {"model": network.state_dict()}
dcp.load(again, checkpoint_id="old")
json.dump({"read": read() - before, "epoch": saved["epoch"], "held": torch.cuda.memory_allocated()}, open("seen.json", "w"))
for _ in range(4):
    network(torch.randn(16, 2048, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_an_old_checkpoint_is_loaded_without_reading_its_tensors(tmp_path: Path):
    subprocess.run([sys.executable, "-c", OLD], cwd=tmp_path, check=True, capture_output=True)
    (tmp_path / "script.py").write_text(TRAIN + LOADS)
    run = dry_run("--gpus", "8", "--", "script.py", folder=tmp_path)
    seen = json.loads((tmp_path / "seen.json").read_text())
    assert (tmp_path / "old.pt").stat().st_size > 3 * 4 * 2048 * 2048
    assert seen["read"] < 4 * 2048 * 2048
    assert seen["epoch"] == 3
    assert seen["held"] >= 3 * 4 * 2048 * 2048
    assert {one["what"] for one in run.answer["stood_in"]} == {"torch.load", "distributed checkpoints"}


MOVED_BY_DATA = """
class Looks(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x.clone()
    @staticmethod
    def backward(context, gradient):
        raise ValueError(f"{places.device} {places[0, 5].item()} {network.scale.device} {held}")
network = nn.Linear(8, 1024)
network.scale = nn.Parameter(torch.tensor([1.0, 2.0] * 512))
places = torch.arange(1024).expand(1, -1)
for one in (*network.parameters(), places):  # as FSDP1 moves a module
    one.data = one.data.to("cuda")
held = torch.cuda.memory_allocated()
embedded = nn.functional.embedding(places, network.weight.t().repeat(128, 1))
(Looks.apply(embedded) * network.scale).sum().backward()
"""


def test_tensors_moved_through_data_are_on_the_gpu_and_a_backward_error_is_reported(tmp_path: Path):
    """Once, an error in the backward ended the process, and a tensor of integers moved through ``.data`` was on no device."""
    (tmp_path / "script.py").write_text(TRAIN + MOVED_BY_DATA)
    run = dry_run("--", "script.py", folder=tmp_path)
    held = 4 * (8 * 1024 + 1024 + 1024) + 8 * 1024
    said = f"zeroplan: the script raised ValueError at script.py:21: cuda:0 5 cuda:0 {held}"
    assert (run.code, run.last_line) == (2, said)
