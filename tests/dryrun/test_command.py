"""How `zeroplan dryrun` reads the command after `--`: scripts, modules, launchers, and commands without a script."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from zeroplan.dryrun.command import Command, read_command
from zeroplan.dryrun.task import DryRunTask, environment
from zeroplan.errors import SpecError

FSDP = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
mixed_precision: bf16
num_machines: 2
num_processes: 16
fsdp_config: {fsdp_version: 1, fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP, fsdp_transformer_layer_cls_to_wrap: BertLayer}
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("")
    Path("fsdp.yaml").write_text(FSDP)
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
        ("accelerate launch --config_file fsdp.yaml train.py --lr 1", 16, 8),
        ("accelerate launch --config_file fsdp.yaml --num_processes 4 --num_machines 1 train.py --lr 1", 4, 4),
        ("python -m torch.distributed.launch --use_env --nproc_per_node=4 train.py --lr 1", 4, 4),
        ("deepspeed --num_gpus 8 --num_nodes 2 train.py --lr 1", 16, 8),
    ],
)
def test_a_launcher_is_read_up_to_the_script(script: str, typed: str, gpus: int | None, per_node: int | None):
    found = read_command(typed.split())
    assert found[:5] == Command(script, module=False, arguments=("--lr", "1"), gpus=gpus, gpus_per_node=per_node)[:5]
    launched = " ".join((*found.launcher[1:], script, "--lr", "1"))
    assert typed.endswith(launched if found.launcher else "train.py --lr 1")


@pytest.mark.parametrize("typed", ["-m pkg.train --x", "python -m pkg.train --x", "torchrun -m pkg.train --x"])
def test_a_module_is_read_like_a_script(typed: str):
    assert read_command(typed.split())[:3] == ("pkg.train", True, ("--x",))


@pytest.mark.usefixtures("script")
@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ("", "no script is named"),
        ("gone.py", "'gone.py' does not exist"),
        ("ls", "'ls' is not a Python script"),
        ("python", "names no script"),
        ("python --version", "names no script"),
        ("torchrun --nproc_per_node 8", "names no script"),
        ("torchrun --nproc_per_node", "needs a value"),
        ("accelerate config", "starts no script"),
        ("accelerate launch --config_file gone.yaml train.py", "'gone.yaml' does not exist"),
    ],
)
def test_a_command_without_a_script_is_refused_in_one_line(typed: str, says: str):
    with pytest.raises(SpecError, match=says):
        read_command(typed.split())


def test_a_rank_has_the_environment_of_torchrun():
    task = DryRunTask(target="train.py", gpus=20, gpus_per_node=8, rank=18, gpu="h100-sxm-80gb", answer="a.json")
    said = environment(task)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK", "GROUP_WORLD_SIZE")
    assert [said[name] for name in names] == ["18", "20", "2", "2", "3"]
    assert "RANK" not in environment(
        DryRunTask(target="train.py", gpus=1, gpus_per_node=8, gpu="h100-sxm-80gb", answer="a.json")
    )


ASKS = """
import json, os, pathlib, sys
pathlib.Path("seen.json").write_text(json.dumps([sys.argv[1:], dict(os.environ)]))
"""


@pytest.mark.torch
@pytest.mark.parametrize(
    ("typed", "argument", "settings"),
    [
        (
            "accelerate launch --config_file fsdp.yaml train.py --lr 1",
            None,
            {"USE_FSDP": "true", "MIXED_PRECISION": "bf16", "FSDP_VERSION": "1", "FSDP_TRANSFORMER_CLS_TO_WRAP": "BertLayer"},
        ),
        ("accelerate launch --num_processes 8 --mixed_precision fp16 train.py --lr 1", None, {"MIXED_PRECISION": "fp16"}),
        (
            "accelerate launch --num_processes 8 --use_deepspeed --zero_stage 2 --offload_optimizer_device cpu train.py --lr 1",
            None,
            {"USE_DEEPSPEED": "true", "DEEPSPEED_ZERO_STAGE": "2", "DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu"},
        ),
        ("deepspeed --num_gpus 8 train.py --lr 1", "--local_rank=3", {}),
        ("deepspeed --num_gpus 8 --no_local_rank train.py --lr 1", None, {}),
        ("python -m torch.distributed.launch --nproc_per_node 8 train.py --lr 1", "--local-rank=3", {}),
        ("torchrun --nproc_per_node 8 train.py --lr 1", None, {}),
    ],
)  # fmt: skip
def test_a_script_has_the_arguments_and_environment_of_its_launcher(
    script: str, typed: str, argument: str | None, settings: dict[str, str], monkeypatch: pytest.MonkeyPatch
):
    pytest.importorskip("torch")
    if "accelerate" in typed:
        pytest.importorskip("accelerate")
    from zeroplan.dryrun.script import run_script

    Path(script).write_text(ASKS)
    monkeypatch.setattr("sys.argv", [])
    monkeypatch.setattr("sys.path", [*sys.path])
    monkeypatch.setattr("os.environ", dict(os.environ))
    found = read_command(typed.split())
    task = DryRunTask(
        target=found.target, arguments=found.arguments, gpus=8, gpus_per_node=8, rank=3, gpu="h100-sxm-80gb", answer="a.json",
        launcher=found.launcher,
    )  # fmt: skip
    run_script(task, task.arguments)
    arguments, environment = json.loads(Path("seen.json").read_text())
    assert arguments == [*([argument] if argument else []), "--lr", "1"]
    of_accelerate = {name.removeprefix("ACCELERATE_"): value for name, value in environment.items()}
    assert {name: of_accelerate[name] for name in settings} == settings
    assert ("MIXED_PRECISION" in of_accelerate) == ("accelerate" in typed)
