"""Imports and calls a user's own workload, ``package.module:function``, and converts it for an engine."""

import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType

import torch
from torch import nn

from zeroplan.errors import MeasurementError, SpecError
from zeroplan.spec.job import JobSpec
from zeroplan.verify.training.modules import find_blocks
from zeroplan.verify.training.recomputation import recompute_blocks
from zeroplan.verify.training.workload import Workload, in_16_bits, store_as


def user_workload(where: str, job: JobSpec) -> Callable[[], Workload]:
    """The workload of ``package.module:function``, with the job's recomputation and weight dtype."""
    function = user_function(where)

    def make() -> Workload:
        work = function(job.batch.micro_batch_size, job.batch.seq_len)
        if job.recipe.precision == "bf16":
            store_as(work.module, torch.bfloat16)
            work = work._replace(batch=in_16_bits(work.batch))
        recompute_blocks(work.blocks[: job.recipe.recompute_layers], job.recipe.recompute)
        if job.recipe.offload_activations:
            raise MeasurementError("offload_activations cannot be applied to a workload's blocks; leave it out")
        return work

    return make


def user_function(where: str) -> Callable[[int, int], Workload]:
    """The function ``package.module:function``, which returns a module, a batch and a loss, or a Workload.

    The batch is a mapping of keyword arguments; the loss maps the module's output to a scalar. Engines wrap a Workload's
    blocks, or else the elements of the longest list of modules. A function with parameters ``micro_batch`` and ``seq_len``
    receives the batch's size.
    """
    function = named_function(where)
    if takes_a_batch(function):
        return lambda micro_batch, seq_len: as_workload(function(micro_batch=micro_batch, seq_len=seq_len), where)
    return lambda _micro_batch, _seq_len: as_workload(function(), where)


def named_function(where: str) -> Callable[..., object]:
    """The function at ``package.module:function``."""
    module_name, _, name = where.partition(":")
    if not module_name or not name or module_name.startswith("."):
        raise SpecError(f"workload {where!r} does not have the form package.module:function")
    function = getattr(_imported(module_name, where), name, None)
    if not callable(function):
        raise SpecError(f"workload {where!r} does not exist: {module_name} has no function {name!r}")
    named: Callable[..., object] = function
    return named


def takes_a_batch(function: Callable[..., object]) -> bool:
    """Whether a function has the parameters ``micro_batch`` and ``seq_len``."""
    try:
        return set(_OF_A_BATCH) <= inspect.signature(function).parameters.keys()
    except ValueError:  # a builtin
        return False


_OF_A_BATCH = ("micro_batch", "seq_len")


def _imported(module_name: str, where: str) -> ModuleType:
    """Import a module. If the current folder contains it, the folder goes on ``sys.path`` first, as for a script."""
    here = str(Path.cwd())
    if here not in sys.path and _holds(here, module_name):
        sys.path.insert(0, here)
    try:
        return importlib.import_module(module_name)
    except ImportError as error:
        raise SpecError(f"workload {where!r} cannot be imported: {error}") from error


def _holds(folder: str, module_name: str) -> bool:
    """Whether a folder contains a module, found without importing anything."""
    *packages, name = module_name.split(".")
    found = PathFinder.find_spec(name, [str(Path(folder, *packages))])
    return found is not None and found.has_location


def as_workload(made: object, where: str) -> Workload:
    """A user's function's result as a Workload. Raises SpecError if it is neither one nor module, batch and loss."""
    if isinstance(made, Workload):
        return made
    match made:
        case (nn.Module() as module, Mapping() as batch, loss) if callable(loss):
            return Workload(module, batch, loss, find_blocks(module))
    raise SpecError(f"workload {where!r} must return a module, a mapping of its arguments and a function that returns the loss")
