"""Runs a user's script in this process as Python would, with the arguments and environment that its launcher sets."""

import os
import runpy
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

from zeroplan.dryrun.task import DryRunTask
from zeroplan.errors import ZeroplanError
from zeroplan.spec.base import Spec
from zeroplan.verify.failures import NotHereError
from zeroplan.verify.replaced import replaced

_OF_A_NODE = ("--machine_rank", "0", "--main_process_ip", "127.0.0.1", "--main_process_port", "0")
"""Flags that accelerate needs on several nodes; the command's own flags override them."""
_OURS = {"CUDA_VISIBLE_DEVICES", "PYTHONPATH", "MASTER_ADDR", "MASTER_PORT"}
"""Variables that a dry run sets itself."""


def run_script(task: DryRunTask, arguments: Sequence[str]) -> None:
    """Run the task's file or module with its own arguments and its launcher's."""
    from zeroplan.verify.fake_cuda.stand_ins import count_as_user  # noqa: PLC0415  torch must be imported later

    os.environ.update(_launcher_environment(task))
    sys.argv = [task.target, *_launcher_arguments(task), *arguments]
    if not task.module:
        sys.path.insert(0, str(Path(task.target).absolute().parent))
        runpy.run_path(task.target, run_name="__main__")
        return
    sys.path.insert(0, str(Path.cwd()))
    spec = find_spec(task.target.partition(".")[0])
    if spec is not None and spec.origin is not None:
        count_as_user(str(Path(spec.origin).parent))
    runpy.run_module(task.target, run_name="__main__", alter_sys=True)


def _launcher_arguments(task: DryRunTask) -> tuple[str, ...]:
    """The arguments that a launcher puts before the script's own.

    Source: deepspeed 0.19, ``launcher/launch.py``; torch 2.13, ``distributed/run.py``, ``use_env``.
    """
    launcher = task.launcher[:1]
    if launcher == ("deepspeed",) and "--no_local_rank" not in task.launcher:
        return (f"--local_rank={task.local_rank}",)
    if launcher == ("torch.distributed.launch",) and not {"--use_env", "--use-env"} & {*task.launcher}:
        return (f"--local-rank={task.local_rank}",)
    return ()


def _launcher_environment(task: DryRunTask) -> dict[str, str]:
    """The environment that accelerate sets from flags and config file: precision, FSDP, DeepSpeed, compiler.

    accelerate's own code reads both; only its launch functions are replaced (accelerate 1.15, ``commands/launch.py``).
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


def answer_or_failure(make_answer: Callable[[], Spec]) -> Spec:
    """The answer, or the failure if the script raised; prints the traceback of the script's own errors."""
    try:
        return make_answer()
    except BaseException as error:  # noqa: BLE001  every error is reported to the parent
        from zeroplan.dryrun.failures import failure, show  # noqa: PLC0415  it imports torch

        if not isinstance(error, (ZeroplanError, SystemExit)):
            show(error)
        return failure(error)


def leave(code: int) -> NoReturn:
    """End this process at once, without the stopped script's threads and atexit functions."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)
