"""`dryrun --backend cuda` with a fake GPU in place of a real one, and the process group that sends nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.dryrun.running import SCRIPTS, dry_run, forked_run
from zeroplan.cli.app import main
from zeroplan.dryrun.command import read_command
from zeroplan.dryrun.on_card.launch import _command
from zeroplan.dryrun.task import DryRunTask

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
ROOT = Path(__file__).parents[2]
FSDP2 = (str(SCRIPTS / "fsdp2.py"), "2", "128", "128")
PEAKS = """
import torch
from torch import nn
model = nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
waste = torch.empty(20, 2**20, device="cuda")
del waste
for _ in range(4):
    model(torch.randn(8, 64, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    print("peak", torch.cuda.max_memory_allocated() // 2**20, torch.cuda.memory_stats()["allocated_bytes.all.peak"] // 2**20)
    torch.cuda.reset_peak_memory_stats()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("card")


#: Makes the command start :mod:`tests.dryrun.fake_card`, which runs the script on a fake GPU.
CARD: dict[str, str | None] = {"zeroplan.dryrun.on_card.launch._CHILD": "tests.dryrun.fake_card"}


def on_card(folder: Path, *typed: str, fake: str = "", replaced: dict[str, str | None] = CARD) -> tuple[int, str, list[str]]:
    """Return the exit code, standard output, and the lines of standard error. ``fake`` sets how the fake GPU differs."""
    found = {"FAKE_CARD": fake, "PYTHONPATH": str(ROOT)}
    run = forked_run("--backend", "cuda", *typed, folder=folder, environment=found, replaced=replaced)
    return run.code, run.output, run.errors.strip().splitlines()


@pytest.fixture(scope="module")
def saved(folder: Path) -> str:
    """Return the file of a dry run of the FSDP2 script for the type of the fake GPU."""
    flags = ("--gpus", "8", "--gpu", "h200", "-q", "--save", "fsdp2.gz")
    assert dry_run("--", *FSDP2, folder=folder, flags=flags).code == 0
    return str(folder / "fsdp2.gz")


def test_one_rank_of_eight_on_one_gpu_agrees_with_a_saved_dry_run(saved: str, folder: Path):
    """Phases agree to the byte, because the fake GPU has the allocator of the dry run and counts cuBLAS's workspaces."""
    code, out, said = on_card(folder, "--gpus", "8", "-q", "--json", "--against", saved, "--", *FSDP2)
    assert code == 0, said
    found = json.loads(out)
    (rank,) = found["measured"]
    assert (rank["rank"], rank["gpus"], rank["alone"], rank["ended"]) == (0, 8, True, "steps taken")
    assert (found["agrees"], found["predicted"]["gpu"]) == (True, "h200-sxm-141gb")
    names = [row["what"] for row in found["phases"]]
    phases = ("forward", "backward", "optimizer step")
    assert names == ["before the first step", *(f"step {number}, {phase}" for number in (1, 2) for phase in phases)]
    assert [row["difference_bytes"] for row in (*found["phases"][1:], *found["judged"][:2], found["reserved"])] == [0] * 9
    assert abs(found["judged"][2]["difference_bytes"]) < 2**16  # held memory: a dry run counts tensors, not blocks


def test_a_script_that_needs_more_than_its_dry_run_exits_with_3(saved: str, folder: Path):
    code, out, said = on_card(folder, "--gpus", "8", "-q", "--against", saved, "--", *FSDP2, fake="more")
    assert code == 3, said
    first = out.splitlines()[0]
    assert first.startswith("DISAGREES: beyond 2.0%, dry run against GPU: peak of step 1 -")
    assert "held after step 2" in " ".join(out.split("\n\n")[0].split())
    assert max(map(len, out.splitlines())) <= 80


def test_running_out_of_memory_is_a_result_that_is_compared(saved: str, folder: Path):
    code, out, said = on_card(folder, "--gpus", "8", "-q", "--against", saved, "--", *FSDP2, fake="full")
    assert code == 3, said
    told = " ".join(out.split())
    assert told.startswith("DISAGREES: the script ran out of memory on the GPU. The dry run: Fits: needs ")
    assert "torch said: CUDA out of memory. Tried to allocate 2.00 GiB." in told
    assert "peak of step 1" in out
    assert "held after" not in out


def test_under_torchrun_each_rank_runs(folder: Path):
    """Torchrun starts two processes; without a saved file the command also makes the dry run."""
    code, out, said = on_card(folder, "-q", "--json", "--", "torchrun", "--nproc-per-node", "2", *FSDP2)
    assert code == 0, said
    found = json.loads(out)
    assert sorted((rank["rank"], rank["gpus"], rank["alone"]) for rank in found["measured"]) == [(0, 2, False), (1, 2, False)]


def test_a_saved_dry_run_of_another_command_is_refused(saved: str, folder: Path):
    for typed, says in (
        (("--gpus", "4", "--", *FSDP2), "is of another number of GPUs: 8 there, 4 here"),
        (("--gpus", "8", "--as-rank", "1", "--", "torchrun", *FSDP2), "is of another rank: 0 there, 1 here"),
        (("--gpus", "8", "--", *FSDP2[:-1], "64"), "is of another script: fsdp2.py 2 128 128 there, fsdp2.py 2 128 64 here"),
    ):
        code, out, said = on_card(folder, "-q", "--against", saved, *typed)
        assert (code, out, len(said)) == (2, "", 1)
        assert says in said[0]


def test_the_script_sees_its_own_peaks_although_each_phase_resets_them(folder: Path):
    (folder / "peaks.py").write_text(PEAKS)
    _, _, said = on_card(folder, "--", "peaks.py")
    peaks = [line.split()[1:] for line in said if line.startswith("peak")]
    assert peaks == [["80", "80"], ["64", "64"]] * 2  # dry run and GPU; cuBLAS keeps its workspaces


@pytest.mark.parametrize(
    ("code", "exits", "says"),
    [
        ("raise ValueError('no data')", 2, "the script raised ValueError at script.py:1: no data"),
        ("import torch; torch.ones(3, device='cuda')", 4, "the script ended without an optimizer step"),
        ("import os; os._exit(7)", 4, "the script's process ended without an answer: exit code 7"),
    ],
)
def test_a_script_that_fails_on_the_gpu_ends_in_one_line(saved: str, folder: Path, code: str, exits: int, says: str):
    (folder / "script.py").write_text(code)
    replaced = CARD | {"zeroplan.cli.dryrun_on_card._require_same": None}
    found = on_card(folder, "-q", "--gpus", "8", "--against", saved, "--", "script.py", replaced=replaced)
    assert found[:2] == (exits, "")
    assert says in found[2][-1]


def test_without_a_gpu_one_line_says_so_before_anything_runs(tmp_path: Path):
    (tmp_path / "train.py").write_text("print('ran')")
    run = dry_run("--backend", "cuda", "--", "train.py", folder=tmp_path, flags=(), environment={"CUDA_VISIBLE_DEVICES": ""})
    assert (run.code, run.output) == (4, "")
    (line,) = run.errors.splitlines()
    assert line.endswith("leave --backend cuda out for a dry run, which needs no GPU")


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--backend", "tpu"), "--backend 'tpu' is none of fake, cuda"),
        (("--backend", "cuda", "--check"), "--check has no effect beside --backend cuda"),
        (("--backend", "cuda", "--profile", "own", "--save", "a.gz"), "--profile has no effect beside --backend cuda"),
        (("--backend", "cuda", "--tolerance", "2"), "--tolerance '2' is not a fraction"),
        (("--backend", "cuda", "--against", "fsdp2.gz", "--save", "b.gz"), "--save has no effect beside --against, whose file"),
    ],
)
def test_flags_without_effect_with_backend_cuda_are_refused(saved: str, folder: Path, capsys, monkeypatch, flags, says: str):
    assert saved
    monkeypatch.chdir(folder)
    with pytest.raises(SystemExit) as ended:
        main(["dryrun", *flags, "--", *FSDP2])
    assert ended.value.code == 2
    assert says in capsys.readouterr().err


def test_a_launcher_starts_zeroplans_process_instead_of_the_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    Path("t.py").write_text("")
    commands = {
        "torchrun --nproc-per-node=4 -m pkg.train --lr 1": "-m torch.distributed.run --nproc-per-node=4 -m CHILD --lr 1",
        "accelerate launch --num_processes 4 --multi_gpu t.py --lr 1":
            "-m accelerate.commands.launch --num_processes 4 --multi_gpu -m CHILD --lr 1",
        "deepspeed --num_gpus 4 t.py --lr 1": "-m deepspeed.launcher.runner --num_gpus 4 --module CHILD --lr 1",
    }  # fmt: skip
    for typed, starts in commands.items():
        found = read_command(typed.split())
        run = DryRunTask(
            target=found.target, arguments=found.arguments, gpus=4, gpus_per_node=4, gpu="h200-sxm-141gb", answer="a"
        )
        started = " ".join(_command(found.launcher, run)[1:])
        assert started.replace("zeroplan.dryrun.on_card.child", "CHILD") == starts


ALONE = """
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from zeroplan.dryrun.on_card.group import make_groups_alone

make_groups_alone()
dist.init_process_group("nccl", rank=3, world_size=4)
assert dist.get_backend() == "nccl" and (dist.get_rank(), dist.get_world_size()) == (3, 4)
part, whole = torch.arange(2.0), torch.zeros(8)
dist.all_gather_into_tensor(whole, part)
assert whole.tolist() == [0, 1] * 4
dist.reduce_scatter_tensor(part, torch.arange(8.0))
assert part.tolist() == [6, 7]
out = [torch.zeros(2) for _ in range(4)]
dist.all_gather(out, part)
dist.all_to_all_single(whole, torch.arange(8.0))
assert whole.tolist() == list(range(8)) and out[0].tolist() == [6, 7]
dist.reduce_scatter(part, [torch.full((2,), float(rank)) for rank in range(4)])
assert part.tolist() == [3, 3]
dist.all_reduce(part)
assert part.tolist() == [3, 3]

torch.manual_seed(0)
plain = nn.Linear(8, 8)
batch = torch.randn(4, 8)
plain(batch).square().mean().backward()
for wrap in (DistributedDataParallel, lambda one: fully_shard(one, mesh=init_device_mesh("cpu", (4,)))):
    model = nn.Linear(8, 8)
    model.load_state_dict(plain.state_dict())
    model = wrap(model)
    for _ in range(2):  # DDP makes its buckets anew
        model.zero_grad()
        model(batch).square().mean().backward()
    for mine, its in zip(model.parameters(), plain.parameters()):
        found = getattr(mine.grad, "_local_tensor", mine.grad)
        rows = its.grad.chunk(4)[3] if found.shape != its.grad.shape else its.grad
        assert torch.isfinite(found).all() and found.shape == rows.shape, (found, rows)
        if wrap is DistributedDataParallel:
            torch.testing.assert_close(4 * found, rows)  # it divides by four, and adds nothing
print("as one of four")
"""


def test_a_group_that_sends_nothing_repeats_the_values_of_this_rank():
    done = subprocess.run([sys.executable, "-c", ALONE], cwd=ROOT, capture_output=True, text=True, check=False, timeout=200)
    assert done.stdout == "as one of four\n", done.stderr
