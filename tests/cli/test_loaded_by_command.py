"""Which large packages each command imports. This keeps start-up fast; a test of the time would depend on the machine."""

import json
import os
import subprocess
import sys

HEAVY = (
    "torch", "transformers", "deepspeed", "numpy", "matplotlib", "pydantic", "rich", "yaml", "huggingface_hub", "fastapi",
)  # fmt: skip
SMALL = ("--model", "gpt2", "--gpu", "l4-24gb", "--gpus", "2", "--seq-len", "256")
#: Commands that answer at once, each with the heavy packages that it imports. The help needs rich.
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
#: Runs each command in a fork of a process that has imported ``zeroplan.cli.app``, and prints the heavy packages it has then.
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


def test_a_command_imports_only_what_its_answer_needs():
    commands = [command for command, _ in LOADS]
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", CODE, json.dumps(commands)], capture_output=True, text=True, check=True, env=environment
    )
    loaded = [tuple(json.loads(line)) for line in done.stdout.splitlines()]
    assert dict(zip(commands, loaded, strict=True)) == dict(LOADS)


def test_python_collects_no_garbage_while_a_command_starts():
    """Collections took a tenth of the time of an estimate."""
    code = (
        "import gc, sys\n"
        "from zeroplan.__main__ import main\n"
        "before = sum(one['collections'] for one in gc.get_stats())\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "print(sum(one['collections'] for one in gc.get_stats()) - before, file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, "estimate", *SMALL], capture_output=True, text=True, check=True)
    assert int(done.stderr.splitlines()[-1]) <= 2
