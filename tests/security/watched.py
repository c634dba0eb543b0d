"""A command in a folder of its own, with every host that it turns to written down, in every process that it starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from zeroplan.current_folder import environment

TINY = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 500, "max_position_embeddings": 512}  # fmt: skip
JOB = ("--config", "tiny/config.json", "--gpus", "2", "--seq-len", "32", "--engine", "fsdp2", "--stage", "3")
TORCH = (
    pytest.mark.torch,
    pytest.mark.skipif(find_spec("torch") is None or find_spec("transformers") is None, reason="torch is not installed"),
)
#: What Python runs first, in every process. Of names of this machine nobody else is asked.
WATCH = """
import os, sys

def watch(event, arguments):
    if event == "socket.getaddrinfo":
        host = arguments[0]
    elif event == "socket.connect" and isinstance(arguments[1], tuple):
        host = arguments[1][0]
    else:
        return
    host = host.decode() if isinstance(host, bytes) else host
    if host not in (None, "", "localhost", "127.0.0.1", "::1", "0.0.0.0", "::", os.uname().nodename):
        with open(os.environ["REACHED"], "a") as file:
            file.write(f"{host} ")

sys.addaudithook(watch)
"""
MODULE = (sys.executable, "-m", "zeroplan")


class Watched:
    """Where commands are run: ``folder``. Beside it lies what they need, and what is written down of them."""

    def __init__(self, base: Path) -> None:
        self.folder, self._reached, self._sprung, self._watch = base / "here", base / "reached", base / "sprung", base / "watch"
        self._watch.mkdir()
        (self._watch / "sitecustomize.py").write_text(WATCH)
        (self.folder / "tiny").mkdir(parents=True, exist_ok=True)
        (self.folder / "tiny" / "config.json").write_text(json.dumps(TINY))

    def run(self, *command: str, code: int = 0, path: str = "") -> None:
        """Run a command, which must do what it is for. ``path`` is put before what is on Python's path anyway."""
        offline = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
        said = {name: value for name, value in environment().items() if name not in ("PYTHONSAFEPATH", *offline)}
        said |= {
            "REACHED": str(self._reached), "SPRUNG": str(self._sprung), "HF_ENDPOINT": "http://hub.invalid",
            "HF_HOME": str(self.folder.parent / "kept"), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
            "PYTHONPATH": os.pathsep.join(filter(None, (f"{path}{self._watch}", said["PYTHONPATH"]))),
        }  # fmt: skip
        done = subprocess.run(command, cwd=self.folder, env=said, capture_output=True, text=True, check=False, timeout=300)
        assert self.sprung() or done.returncode == code, done.stderr

    def sprung(self) -> str:
        """Which modules of the folder were run."""
        return self._sprung.read_text() if self._sprung.exists() else ""

    def reached(self) -> str:
        """To which hosts commands turned that are not this one."""
        return self._reached.read_text() if self._reached.exists() else ""
