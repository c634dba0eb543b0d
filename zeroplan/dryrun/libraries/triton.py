"""Triton: skips every launch. Results are counted, since torch allocates them before the launch."""

from types import ModuleType

from zeroplan.dryrun.patches import Patch
from zeroplan.dryrun.replacements import noting
from zeroplan.verify.replaced import always, put


def _launch_nothing(_: ModuleType) -> None:
    from triton.runtime import autotuner, jit  # noqa: PLC0415  it is imported by now

    launched = noting("Triton kernels", "not launched; memory they allocate inside is not counted", always(None))
    put(jit.JITFunction, run=launched)
    for owner in (autotuner.Autotuner, autotuner.Heuristics):
        put(owner, run=launched)


PATCHES: dict[str, Patch] = {"triton": _launch_nothing}
