"""Registers the operators that have a kernel of their own on CUDA, so that torch does not decompose them."""

import torch

_LIBRARIES: list[torch.library.Library] = []
"""Keeps the registered kernels alive."""


_CUDAS_ALONE, _NOT_CUDAS = frozenset({"aten::_fused_rms_norm"}), frozenset({"aten::native_channel_shuffle"})
"""Operators with a kernel in CUDA builds only, and operators without one there (torch 2.13)."""


def register_kernels() -> None:
    """Register a kernel on CUDA for every operator that has one; torch would decompose the others.

    CUDA has one wherever the CPU has one, with few named exceptions. No kernel is ever called, since fake tensors answer before.
    """
    library = torch.library.Library("aten", "IMPL", "CUDA")  # type: ignore[no-untyped-call]
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    for name in torch._C._dispatch_get_all_op_names():
        taken_apart = name.startswith("aten::") and has(name, "CompositeImplicitAutograd")
        if taken_apart and name not in _NOT_CUDAS and (name in _CUDAS_ALONE or has(name, "CPU")):
            library.impl(name.removeprefix("aten::"), _never)  # type: ignore[no-untyped-call]
    _LIBRARIES.append(library)


def _never(*_args: object, **_options: object) -> object:
    raise AssertionError("a tensor on the fake GPU has bytes; all tensors there must be fake")
