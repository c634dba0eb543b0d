"""Runs a command in a folder of its own, and records every host that it or a process of it contacts."""

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
#: ``sitecustomize``, which Python runs first in every process. It records all hosts except this machine.
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
    """Runs commands in ``folder``. Their helper files and the records about them lie beside it."""

    def __init__(self, base: Path) -> None:
        self.folder, self._reached, self._sprung, self._watch = base / "here", base / "reached", base / "sprung", base / "watch"
        self._watch.mkdir()
        (self._watch / "sitecustomize.py").write_text(WATCH)
        (self.folder / "tiny").mkdir(parents=True, exist_ok=True)
        (self.folder / "tiny" / "config.json").write_text(json.dumps(TINY))

    def run(self, *command: str, code: int = 0, path: str = "") -> None:
        """Run a command; assert its exit code, unless a trap was run. ``path`` is put first on PYTHONPATH."""
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
        """Return the names of the traps that were run."""
        return self._sprung.read_text() if self._sprung.exists() else ""

    def reached(self) -> str:
        """Return the other hosts that commands contacted."""
        return self._reached.read_text() if self._reached.exists() else ""
