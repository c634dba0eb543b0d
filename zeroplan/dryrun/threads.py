"""Gives every thread of a script the dispatch modes of the first thread, since torch keeps modes per thread."""

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _push_mode

from zeroplan.dryrun.loop import StepsDone
from zeroplan.verify.replaced import put


def watch_threads(modes: Sequence[TorchDispatchMode], end_now: Callable[[], None]) -> None:
    """Run every new thread in these modes; ``end_now`` ends the process if the last step ends in such a thread."""
    begin: Callable[[threading.Thread], None] = threading.Thread._bootstrap_inner  # type: ignore[attr-defined]
    shown = threading.excepthook

    def bootstrap(thread: threading.Thread) -> None:
        with ExitStack() as stack:
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            for mode in modes:
                _push_mode(mode)
                stack.callback(_pop_mode)
            begin(thread)

    def hook(args: threading.ExceptHookArgs) -> None:
        if issubclass(args.exc_type, StepsDone):
            end_now()
        shown(args)

    put(threading.Thread, _bootstrap_inner=bootstrap)
    put(threading, excepthook=hook)
