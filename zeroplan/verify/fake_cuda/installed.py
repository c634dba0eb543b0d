"""Installs the fake GPU in this process, until the process ends."""

from contextlib import suppress
from functools import cache

import torch
import torch._dynamo  # must be imported before CUDA is faked, since it checks the build

from zeroplan.catalog.gpu import gpu as gpu_named
from zeroplan.spec.hardware import ClusterSpec, GpuSpec, node_size
from zeroplan.verify.fake_cuda import cpp, torch_cuda
from zeroplan.verify.fake_cuda.memory import Memory

CUDA = "cuda"
"""The name of the device."""
_ANY_GPU, _A_NODE = "h100-sxm-80gb", 8
"""Defaults of install_node; they affect no size."""


def install(gpu: GpuSpec, memory: Memory, *, ranks: int = 1, local_rank: int = 0) -> None:
    """Make torch see this many GPUs of a kind; a second call changes them. Raises NotHereError where that is impossible."""
    _enable()
    torch_cuda.patch_torch_cuda(torch_cuda.Gpus(gpu, ranks, local_rank, memory))
    _begin()


@cache
def _begin() -> None:
    """Mark CUDA as initialised in C++; before that, ``torch.tensor`` would place tensors on cuda:0."""
    with suppress(RuntimeError):  # no kernel can allocate the tensor
        torch.empty(0, device="cuda")


def install_node(cluster: ClusterSpec | None = None) -> None:
    """Make torch see the GPUs of one node, as rank 0 sees them."""
    cluster = cluster or ClusterSpec()
    found = cluster.gpu or gpu_named(_ANY_GPU)
    install(found, Memory(int(found.memory_bytes.value)), ranks=node_size(cluster) or _A_NODE)


@cache
def _enable() -> None:
    cpp.enable_cuda()
    register_kernels()


_LIBRARIES: list[torch.library.Library] = []
"""Keeps the registered kernels alive."""


_CUDAS_ALONE, _NOT_CUDAS = frozenset({"aten::_fused_rms_norm"}), frozenset({"aten::native_channel_shuffle"})
"""Operators with a kernel in CUDA builds only, and operators without one there (torch 2.13)."""


def register_kernels() -> None:
    """Register a CUDA kernel for every operator that has one on a GPU; torch decomposes operators without.

    CUDA has a kernel wherever the CPU has one, with few named exceptions. Fake tensors return before any kernel is called.
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
