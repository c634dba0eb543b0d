"""Megatron-LM: skips the search for nvcc and the compilation, and reports backwards that call autograd's engine directly.

Source: ``megatron/legacy/fused_kernels`` and ``megatron/core/pipeline_parallel/schedules.py`` (``custom_backward``), 0.16.
"""

from types import ModuleType

from zeroplan.dryrun.loop import Loop
from zeroplan.dryrun.patches import Patch
from zeroplan.dryrun.replacements import noting
from zeroplan.verify.replaced import always, put


def _compile_nothing(module: ModuleType) -> None:
    put(module, load=noting("Megatron-LM's compiled kernels", "none is compiled; using one ends the run", always(None)))


def patches(loop: Loop) -> dict[str, Patch]:
    """The patches for Megatron-LM, applied at its import."""

    def tell_backward(module: ModuleType) -> None:
        put(module, custom_backward=loop.in_backward(module.custom_backward))

    return {"megatron.legacy.fused_kernels": _compile_nothing, "megatron.core.pipeline_parallel.schedules": tell_backward}
