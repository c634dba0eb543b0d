"""A process that believes in CUDA: everything that is put in place once, for good."""

from contextlib import suppress
from functools import cache

import torch
import torch._dynamo  # it looks at what was built, so it goes before CUDA is there

from zeroplan.catalog.gpu import gpu as gpu_named
from zeroplan.spec.hardware import ClusterSpec, GpuSpec, node_size
from zeroplan.verify.fake_cuda import cpp, kernels, torch_cuda
from zeroplan.verify.fake_cuda.memory import Memory

CUDA = "cuda"
"""The device's name."""
_ANY_GPU, _A_NODE = "h100-sxm-80gb", 8
"""Where nobody says otherwise: they decide no size."""


def install(gpu: GpuSpec, memory: Memory, *, ranks: int = 1, local_rank: int = 0) -> None:
    """Make torch believe in so many GPUs; called again, in others. Raises NotHereError where that cannot be done."""
    _make_known()
    torch_cuda.answer_for(torch_cuda.Gpus(gpu, ranks, local_rank, memory))
    _begin()


@cache
def _begin() -> None:
    """Have C++ note that CUDA has begun, which it does before it asks for memory: until then ``torch.tensor`` means cuda:0."""
    with suppress(RuntimeError):  # there is no kernel that would give any
        torch.empty(0, device="cuda")


def install_node(cluster: ClusterSpec | None = None) -> None:
    """Make torch believe in the GPUs of one node, as rank 0 sees them."""
    cluster = cluster or ClusterSpec()
    found = cluster.gpu or gpu_named(_ANY_GPU)
    install(found, Memory(int(found.memory_bytes.value)), ranks=node_size(cluster) or _A_NODE)


@cache
def _make_known() -> None:
    cpp.make_cuda_known()
    kernels.give_own_kernels()
