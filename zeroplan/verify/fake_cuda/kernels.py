"""Which operators run on the fake GPU: CUDA's own where it has one."""

import torch

_LIBRARIES: list[torch.library.Library] = []
"""Kernels are there as long as their library."""


_CUDAS_ALONE, _NOT_CUDAS = frozenset({"aten::_fused_rms_norm"}), frozenset({"aten::native_channel_shuffle"})
"""Where CUDA differs from the CPU: what has a kernel in a CUDA build alone, and what has none there (torch 2.13)."""


def give_own_kernels() -> None:
    """Have an operator of its own on CUDA wherever CUDA has one: torch would take others apart into simpler ones.

    That is wherever the CPU has one, but for the few that are named. No kernel is ever called, since fake tensors answer before.
    """
    library = torch.library.Library("aten", "IMPL", "CUDA")  # type: ignore[no-untyped-call]
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    for name in torch._C._dispatch_get_all_op_names():
        taken_apart = name.startswith("aten::") and has(name, "CompositeImplicitAutograd")
        if taken_apart and name not in _NOT_CUDAS and (name in _CUDAS_ALONE or has(name, "CPU")):
            library.impl(name.removeprefix("aten::"), _never)  # type: ignore[no-untyped-call]
    _LIBRARIES.append(library)


def _never(*_args: object, **_options: object) -> object:
    raise AssertionError("a tensor on the fake GPU has bytes; all of them are meant to be fake")
