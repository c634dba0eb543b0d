"""Parses the command after ``--``: a script, a module, or a launcher with one of them. Does not import torch.

>>> found = read_command(["torchrun", "--nproc_per_node", "8", "--nnodes=2", "-m", "torchtitan.train", "--steps", "9"])
>>> found.target, found.module, found.arguments, found.gpus, found.gpus_per_node
('torchtitan.train', True, ('--steps', '9'), 16, 8)
>>> found.launcher
('torchrun', '--nproc_per_node', '8', '--nnodes=2')
"""

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from zeroplan.catalog.setups.parsing import parsed
from zeroplan.errors import SpecError

_PYTHON = re.compile(r"python[0-9.]*")
#: Flags of torchrun, accelerate and deepspeed without a value; every other flag has one.
_SWITCHES = {
    "torchrun": {"--standalone", "--no-python", "--no_python", "--run-path", "--run_path", "--module", "-m"},
    "accelerate": {
        "--multi_gpu", "--multi-gpu", "--use_fsdp", "--use-fsdp", "--use_deepspeed", "--use-deepspeed", "--module", "-m", "--debug",
        "--no_python", "--quiet", "-q", "--cpu", "--tpu", "--use_megatron_lm", "--same_network",
    },
    "deepspeed": {"--module", "--no_python", "--no_local_rank", "--force_multi", "--save_pid", "--no_ssh"},
}  # fmt: skip
_SWITCHES["torch.distributed.launch"] = _SWITCHES["torchrun"] | {"--use_env", "--use-env"}
_OF_THE_SCRIPT = {"-m", "--module", "--no-python", "--no_python", "--run-path", "--run_path"}
"""Switches that decide how to read the script's name."""
_PER_NODE = ("nproc-per-node", "num-gpus")
_NODES = ("nnodes", "num-nodes", "num-machines")
_IN_ALL = ("num-processes",)


class Command(NamedTuple):
    """The script to run, and the number of GPUs if a launcher sets it. ``launcher`` holds the launcher and its flags."""

    target: str
    module: bool
    arguments: tuple[str, ...]
    gpus: int | None = None
    gpus_per_node: int | None = None
    launcher: tuple[str, ...] = ()


def read_command(words: Sequence[str]) -> Command:
    """Parse a command. Raises SpecError if it names no script, or one that is not Python."""
    if not words:
        raise SpecError("no script is named; write it behind `--`: zeroplan dryrun --gpus 8 -- train.py")
    launcher = Path(words[0]).name
    if launcher == "accelerate":
        return _launched("accelerate", _after(words, "launch"))
    if launcher in ("torchrun", "deepspeed"):
        return _launched(launcher, words[1:])
    if _PYTHON.fullmatch(launcher):
        return _python(words[1:])
    return _python(words)


def _after(words: Sequence[str], verb: str) -> Sequence[str]:
    if len(words) < 2 or words[1] != verb:
        raise SpecError(f"`{' '.join(words[:2])}` starts no script; write `{words[0]} {verb} train.py`")
    return words[2:]


def _python(words: Sequence[str]) -> Command:
    """Parse the words after ``python``: drop the interpreter's flags, then read a file, or ``-m`` and a module."""
    rest = list(words)
    while rest and rest[0] in ("-u", "-B", "-O", "-E", "-s", "-I"):
        rest.pop(0)
    if rest[:1] == ["-m"] and len(rest) > 1:
        if rest[1] == "torch.distributed.run":
            return _launched("torchrun", rest[2:])
        if rest[1] == "torch.distributed.launch":
            return _launched(rest[1], rest[2:])
        if rest[1] == "accelerate.commands.launch":
            return _launched("accelerate", rest[2:])
        return Command(rest[1], module=True, arguments=tuple(rest[2:]))
    if not rest or rest[0].startswith("-"):
        raise SpecError(f"{' '.join(words) or 'python'!r} names no script; write `train.py`, or `-m package.module`")
    return Command(_script(rest[0]), module=False, arguments=tuple(rest[1:]))


def _launched(launcher: str, words: Sequence[str]) -> Command:
    """Parse a launcher's flags, then the script and its arguments."""
    flags: dict[str, str] = {}
    rest, kept, module = list(words), [launcher], False
    while rest and rest[0].startswith("-"):
        flag, separate, value = rest.pop(0).partition("=")
        if flag in _SWITCHES[launcher]:
            module = module or flag in ("-m", "--module")
            kept += [] if flag in _OF_THE_SCRIPT else [flag]
            continue
        if not separate:
            if not rest:
                raise SpecError(f"{launcher} {flag} needs a value; write it behind the flag")
            value = rest.pop(0)
        flags[flag.lstrip("-").replace("_", "-")] = value
        kept += [f"{flag}={value}"] if separate else [flag, value]
    if not rest:
        raise SpecError(f"`{launcher} {' '.join(words)}` names no script; write it behind the launcher's flags")
    target = rest[0] if module else _script(rest[0])
    gpus, per_node = _gpus(_configured(flags) | flags)
    return Command(target, module, tuple(rest[1:]), gpus, per_node, tuple(kept))


def _configured(flags: dict[str, str]) -> dict[str, str]:
    """The number of GPUs in accelerate's config file; flags override it."""
    name = flags.get("config-file")
    if name is None:
        return {}
    if not _is_file(name):
        raise SpecError(f"accelerate's --config_file {name!r} does not exist; check the path, relative to {Path.cwd()}")
    found = parsed(Path(name).read_text(encoding="utf-8"), Path(name), name)
    return {key.replace("_", "-"): str(found[key]) for key in ("num_processes", "num_machines") if key in found}


def _gpus(flags: dict[str, str]) -> tuple[int | None, int | None]:
    """The number of GPUs in a launcher's flags, in total and per node; None if the launcher uses all GPUs it finds."""
    nodes = _first(flags, _NODES, default=1)
    if (in_all := _first(flags, _IN_ALL)) is not None:
        return in_all, in_all // nodes if nodes else None
    per_node = _first(flags, _PER_NODE)
    return (None if per_node is None or nodes is None else per_node * nodes), per_node


def _first(flags: dict[str, str], names: Sequence[str], *, default: int | None = None) -> int | None:
    for name in names:
        text = flags.get(name)
        if text is not None and (number := text.rpartition(":")[2]).isdigit():
            return int(number)
    return default


def _script(path: str) -> str:
    if not path.endswith(".py") and not _is_file(path):
        raise SpecError(
            f"{path!r} is not a Python script; name a .py file, `-m package.module`, torchrun, accelerate launch or deepspeed"
        )
    if not _is_file(path):
        raise SpecError(f"the script {path!r} does not exist; check the path, relative to {Path.cwd()}")
    return path


_is_file: Callable[[str], bool] = os.path.isfile
