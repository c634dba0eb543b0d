"""What each command loads beside itself: start-up is guarded by the set of modules, not by the clock."""

import json
import os
import subprocess
import sys

HEAVY = (
    "torch", "transformers", "deepspeed", "numpy", "matplotlib", "pydantic", "rich", "yaml", "huggingface_hub", "fastapi",
)  # fmt: skip
SMALL = ("--model", "gpt2", "--gpu", "l4-24gb", "--gpus", "2", "--seq-len", "256")
#: A command that answers at once, and those of the heavy ones that it may load; help is drawn by rich.
LOADS = (
    (("estimate", *SMALL), ()),
    (("advise", *SMALL), ()),
    (("plan", *SMALL), ("numpy",)),
    (("models",), ("pydantic",)),
    (("gpus",), ("pydantic",)),
    (("--version",), ()),
    (("verify", *SMALL, "--backend", "none"), ()),
    (("verify", "--matrix", "none"), ("rich",)),
    (("explore", "--port", "none"), ()),
    (("plot", "stages", "--help"), ("rich",)),
)
#: Each command in a copy of a process that has what all of them have.
CODE = f"""
import io, json, os, sys
from contextlib import redirect_stderr, redirect_stdout, suppress
from zeroplan.cli.app import main
for command in json.loads(sys.argv[1]):
    child = os.fork()
    if not child:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()), suppress(SystemExit):
            main(command)
        os.write(1, (json.dumps([name for name in {HEAVY} if name in sys.modules]) + chr(10)).encode())
        os._exit(0)
    os.waitpid(child, 0)
"""


def test_a_command_loads_no_more_than_its_answer_needs():
    commands = [command for command, _ in LOADS]
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", CODE, json.dumps(commands)], capture_output=True, text=True, check=True, env=environment
    )
    loaded = [tuple(json.loads(line)) for line in done.stdout.splitlines()]
    assert dict(zip(commands, loaded, strict=True)) == dict(LOADS)
