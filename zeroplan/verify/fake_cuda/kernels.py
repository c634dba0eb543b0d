"""Which operators run on the fake GPU: CUDA's own where it has one."""

import torch

_LIBRARIES: list[torch.library.Library] = []
"""Kernels are there as long as their library."""


def give_own_kernels() -> None:
    """Have an operator of its own on CUDA wherever the CPU has one: torch would take others apart into simpler ones.

    No kernel is ever called, since fake tensors answer before.
    """
    library = torch.library.Library("aten", "IMPL", "CUDA")  # type: ignore[no-untyped-call]
    for name in torch._C._dispatch_get_all_op_names():
        taken_apart = torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd")
        if name.startswith("aten::") and taken_apart and torch._C._dispatch_has_kernel_for_dispatch_key(name, "CPU"):
            library.impl(name.removeprefix("aten::"), _never)  # type: ignore[no-untyped-call]
    _LIBRARIES.append(library)


def _never(*_args: object, **_options: object) -> object:
    raise AssertionError("a tensor on the fake GPU has bytes; all of them are meant to be fake")
