"""What a launcher gives a script beside its rank: accelerate its settings as environment, deepspeed the rank as an argument."""

import os
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from zeroplan.dryrun.task import DryRunTask
from zeroplan.verify.failures import NotHereError
from zeroplan.verify.replaced import replaced

_OF_A_NODE = ("--machine_rank", "0", "--main_process_ip", "127.0.0.1", "--main_process_port", "0")
"""What accelerate asks for on several nodes, or looks for; what is typed behind it counts."""
_OURS = {"CUDA_VISIBLE_DEVICES", "PYTHONPATH", "MASTER_ADDR", "MASTER_PORT"}
"""What a dry run sets itself."""


def arguments(task: DryRunTask) -> tuple[str, ...]:
    """Return the arguments that a launcher puts before the script's own.

    Source: deepspeed 0.19, ``launcher/launch.py``; torch 2.13, ``distributed/run.py``, ``use_env``.
    """
    launcher = task.launcher[:1]
    if launcher == ("deepspeed",) and "--no_local_rank" not in task.launcher:
        return (f"--local_rank={task.local_rank}",)
    if launcher == ("torch.distributed.launch",) and not {"--use_env", "--use-env"} & {*task.launcher}:
        return (f"--local-rank={task.local_rank}",)
    return ()


def environment(task: DryRunTask) -> dict[str, str]:
    """Return what accelerate sets for the processes that it starts: precision, FSDP, DeepSpeed, compiler, from flags and file.

    accelerate itself reads both, and starts nothing (accelerate 1.15, ``commands/launch.py``).
    """
    if task.launcher[:1] != ("accelerate",):
        return {}
    from accelerate.commands import launch  # noqa: PLC0415  only such a command needs it

    found: dict[str, str] = {}
    starts: dict[str, Callable[..., Any]] = {
        "simple_launcher": lambda args: found.update(launch.prepare_simple_launcher_cmd_env(args)[1]),
        "multi_gpu_launcher": lambda args: found.update(launch.prepare_multi_gpu_env(args)),
        "deepspeed_launcher": lambda args: found.update(launch.prepare_deepspeed_cmd_env(args)[1]),
        "tpu_launcher": _refuse, "tpu_pod_launcher": _refuse, "sagemaker_launcher": _refuse,
    }  # fmt: skip
    with ExitStack() as stack:
        for name, start in starts.items():
            stack.enter_context(replaced(launch, name, start))
        launch.launch_command(launch.launch_command_parser().parse_args([*_OF_A_NODE, *task.launcher[1:], task.target]))
    return {name: value for name, value in found.items() if os.environ.get(name) != value and name not in _OURS}


def _refuse(*_: object) -> None:
    raise NotHereError("accelerate starts this script on a TPU or on SageMaker; a dry run knows CUDA alone")
