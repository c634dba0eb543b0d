"""What a launcher passes to a script beside its rank: accelerate's environment, deepspeed's argument with the rank."""

import os
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from zeroplan.dryrun.task import DryRunTask
from zeroplan.verify.failures import NotHereError
from zeroplan.verify.replaced import replaced

_OF_A_NODE = ("--machine_rank", "0", "--main_process_ip", "127.0.0.1", "--main_process_port", "0")
"""Flags that accelerate needs or prompts for on several nodes; the command's own flags override them."""
_OURS = {"CUDA_VISIBLE_DEVICES", "PYTHONPATH", "MASTER_ADDR", "MASTER_PORT"}
"""Variables that a dry run sets itself."""


def arguments(task: DryRunTask) -> tuple[str, ...]:
    """The arguments that a launcher puts before the script's own.

    Source: deepspeed 0.19, ``launcher/launch.py``; torch 2.13, ``distributed/run.py``, ``use_env``.
    """
    launcher = task.launcher[:1]
    if launcher == ("deepspeed",) and "--no_local_rank" not in task.launcher:
        return (f"--local_rank={task.local_rank}",)
    if launcher == ("torch.distributed.launch",) and not {"--use_env", "--use-env"} & {*task.launcher}:
        return (f"--local-rank={task.local_rank}",)
    return ()


def environment(task: DryRunTask) -> dict[str, str]:
    """The environment that accelerate sets for its processes, from flags and config file: precision, FSDP, DeepSpeed, compiler.

    accelerate's own code reads both; its launch functions are replaced (accelerate 1.15, ``commands/launch.py``).
    """
    if task.launcher[:1] != ("accelerate",):
        return {}
    from accelerate.commands import launch  # noqa: PLC0415  only accelerate's commands need it

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
    raise NotHereError("accelerate would start this script on a TPU or on SageMaker; a dry run fakes CUDA only")
