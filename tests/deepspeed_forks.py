"""Runs as a process with torch and DeepSpeed that answers each line of standard input in a new fork."""

from __future__ import annotations

import logging
import os
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import torch


def serve(answer: Callable[[str], str], *, where_it_fails: str) -> None:
    """Write one line of standard output for each line of standard input."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401  each fork would compile it again
    import transformers.models.gpt2.modeling_gpt2
    import transformers.models.llama.modeling_llama  # noqa: F401
    from deepspeed.utils import logger

    logger.setLevel(logging.ERROR)
    import_module("deepspeed.comm.torch").build_shm_op = lambda: None  # tests/stale_lock.py
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # DeepSpeed prints to standard output
    for line in sys.stdin:
        with tempfile.NamedTemporaryFile("r") as file:
            if os.fork() == 0:
                _answer_and_leave(answer, line, Path(file.name))
            os.wait()
            answers.write((file.read() or where_it_fails) + "\n")
            answers.flush()


def _answer_and_leave(answer: Callable[[str], str], line: str, file: Path) -> None:
    """Run in this fork and end it, whatever happens."""
    try:
        file.write_text(answer(line))
    except Exception:  # noqa: BLE001  any failure is reported, and the fork must end
        traceback.print_exc()
    finally:
        os._exit(0)
