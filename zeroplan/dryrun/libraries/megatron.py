"""Megatron-LM: it looks for nvcc, and would compile, before it trains (``megatron/legacy/fused_kernels``, 0.16)."""

from types import ModuleType

from zeroplan.dryrun.patches import Patch
from zeroplan.dryrun.stood_in import noting
from zeroplan.verify.fake_cuda.torch_cuda import always
from zeroplan.verify.replaced import put


def _compile_nothing(module: ModuleType) -> None:
    put(module, load=noting("Megatron-LM's compiled kernels", "none is compiled; what uses one ends the run", always(None)))


PATCHES: dict[str, Patch] = {"megatron.legacy.fused_kernels": _compile_nothing}
