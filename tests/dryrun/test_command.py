"""The command behind `--`: scripts, modules and launchers, and what is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from zeroplan.dryrun.command import Command, read_command
from zeroplan.dryrun.task import DryRunTask, environment
from zeroplan.errors import SpecError


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("")
    return "train.py"


@pytest.mark.parametrize(
    ("typed", "gpus", "per_node"),
    [
        ("train.py --lr 1", None, None),
        ("python -u train.py --lr 1", None, None),
        ("/usr/bin/python3.11 train.py --lr 1", None, None),
        ("torchrun --nproc_per_node 8 train.py --lr 1", 8, 8),
        ("torchrun --standalone --nproc-per-node=4 --nnodes 2 train.py --lr 1", 8, 4),
        ("torchrun --nnodes 1:4 --nproc-per-node gpu train.py --lr 1", None, None),
        ("python -m torch.distributed.run --nproc-per-node 2 train.py --lr 1", 2, 2),
        ("accelerate launch --multi_gpu --num_processes 16 --num_machines 2 train.py --lr 1", 16, 8),
        ("accelerate launch --config_file fsdp.yaml train.py --lr 1", None, None),
        ("deepspeed --num_gpus 8 --num_nodes 2 train.py --lr 1", 16, 8),
    ],
)
def test_a_launcher_is_read_as_far_as_the_script(script: str, typed: str, gpus: int | None, per_node: int | None):
    found = read_command(typed.split())
    assert found[:5] == Command(script, module=False, arguments=("--lr", "1"), gpus=gpus, gpus_per_node=per_node)[:5]
    launched = " ".join((*found.launcher[1:], script, "--lr", "1"))
    assert typed.endswith(launched if found.launcher else "train.py --lr 1")


@pytest.mark.parametrize("typed", ["-m pkg.train --x", "python -m pkg.train --x", "torchrun -m pkg.train --x"])
def test_a_module_is_one_too(typed: str):
    assert read_command(typed.split())[:3] == ("pkg.train", True, ("--x",))


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ("", "no script is named"),
        ("gone.py", "'gone.py' is not there"),
        ("ls", "'ls' is no Python script"),
        ("python", "names no script"),
        ("python --version", "names no script"),
        ("torchrun --nproc_per_node 8", "names no script"),
        ("torchrun --nproc_per_node", "wants a value"),
        ("accelerate config", "starts no script"),
    ],
)
def test_what_names_no_script_is_refused_in_one_line(typed: str, says: str):
    with pytest.raises(SpecError, match=says):
        read_command(typed.split())


def test_a_rank_hears_what_torchrun_would_tell_it():
    task = DryRunTask(target="train.py", gpus=20, gpus_per_node=8, rank=18, gpu="h100-sxm-80gb", answer="a.json")
    said = environment(task)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK", "GROUP_WORLD_SIZE")
    assert [said[name] for name in names] == ["18", "20", "2", "2", "3"]
    assert "RANK" not in environment(
        DryRunTask(target="train.py", gpus=1, gpus_per_node=8, gpu="h100-sxm-80gb", answer="a.json")
    )
