"""Checks before training whether the job fits: a function for any loop, and callbacks for transformers' Trainer and Lightning.

.. code-block:: python

    from zeroplan.hooks import MemoryCheck, LightningMemoryCheck, check_memory

    check_memory(from_file="llama3_8b.toml")  # torchtitan, or a loop of one's own, before it loads the model
    transformers.Trainer(..., callbacks=[MemoryCheck(seq_len=4096)])
    lightning.Trainer(..., callbacks=[LightningMemoryCheck(model="llama-3.1-8b", micro_batch=2, seq_len=4096)])

Each stops a run that cannot fit. For a job that is not modelled, it prints a message and training continues.
"""

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Literal

from zeroplan.errors import SpecError, ZeroplanError
from zeroplan.estimator import Estimate, judged
from zeroplan.report.checks import loop_beside, passes
from zeroplan.report.words import verdict_sentence
from zeroplan.resolve import Request, resolve, with_setup
from zeroplan.units import GIBIBYTES

if TYPE_CHECKING:
    from zeroplan.hooks.lightning import LightningMemoryCheck
    from zeroplan.hooks.trainer import MemoryCheck

__all__ = ["IfTooLarge", "LightningMemoryCheck", "MemoryCheck", "WillNotFitError", "check_memory"]

IfTooLarge = Literal["stop", "warn"]
_CALLBACKS = {"MemoryCheck": "trainer", "LightningMemoryCheck": "lightning"}


def __getattr__(name: str) -> object:
    """Return a callback; only the program that it is for is imported."""
    if name in _CALLBACKS:
        return getattr(import_module(f"{__name__}.{_CALLBACKS[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class WillNotFitError(RuntimeError):
    """The job cannot fit its GPU: its peak plus memory outside the allocator exceed the GPU's memory."""


def check_memory(*, if_too_large: IfTooLarge = "stop", **flags: object) -> Estimate | None:
    """Return the estimate of a job, and stop the job if it cannot fit; returns None if the job is not modelled.

    The keywords are those of :func:`zeroplan.job`, such as ``from_file``, ``model``, ``seq_len`` and ``engine``. The default of
    ``gpus`` is the launcher's ``WORLD_SIZE``, that of ``gpu`` is this machine's GPU. ``if_too_large``: ``stop`` raises
    :class:`WillNotFitError`, ``warn`` prints a warning. Only rank 0 prints, to stderr.
    """
    world = os.environ.get("WORLD_SIZE", "")
    try:
        if flags.get("gpus") is None and world.isdigit():
            flags["gpus"] = int(world)
        request = Request(**{"gpu": None, **flags})  # type: ignore[arg-type]  # Request checks every field
        if request.gpu is None:
            request = Request(**{**flags, "gpu": own_gpu()})  # type: ignore[arg-type]  # as above
    except ZeroplanError as error:
        _unknown(error)
        return None
    return checked(request, if_too_large)


def checked(request: Request, if_too_large: IfTooLarge, *, prints: bool | None = None) -> Estimate | None:
    """Return the estimate of a request and print its verdict; raises :class:`WillNotFitError`."""
    prints = os.environ.get("RANK", "0") == "0" if prints is None else prints
    try:
        found = resolve(request)
        predicted, loop = judged(found.job), loop_beside(found.job, found.loop)
    except ZeroplanError as error:
        _unknown(error, prints=prints)
        return None
    verdict = f"{verdict_sentence(predicted, GIBIBYTES)}{'' if loop is None else f' {loop.says}'}"
    if not (passes(predicted) and (loop is None or loop.fits is not False)) and if_too_large == "stop":
        raise WillNotFitError(f"zeroplan: {verdict} With if_too_large='warn' it trains all the same.")
    say(verdict, prints=prints)
    for note in with_setup(request).setup.matters.values():
        say(note, prints=prints)
    return predicted


def _unknown(error: ZeroplanError, *, prints: bool = True) -> None:
    say(f"cannot check whether this job fits: {error}", prints=prints)


def own_gpu() -> str:
    """Return the name of this machine's GPU; raises SpecError if there is none."""
    import torch  # noqa: PLC0415  a job that names its GPU needs no torch

    if not torch.cuda.is_available():
        raise SpecError("there is no GPU here; name one: gpu='h100-sxm-80gb'")
    return torch.cuda.get_device_name()


def said_afterwards(predicted: Estimate, *, prints: bool) -> None:
    """Print the measured peak of a run, and the estimate's error; only on a GPU."""
    import torch  # noqa: PLC0415  as above

    if torch.cuda.is_available():
        measured = torch.cuda.max_memory_allocated()
        sizes = f"predicted {GIBIBYTES.size(predicted.peak_bytes)}, measured {GIBIBYTES.size(measured)}"
        say(f"peak allocated: {sizes} ({100 * (predicted.peak_bytes / measured - 1):+.1f} %)", prints=prints)


def say(text: str, *, prints: bool) -> None:
    """Print a message on stderr, if ``prints``: on rank 0."""
    if prints:
        print(f"zeroplan: {text}", file=sys.stderr, flush=True)
