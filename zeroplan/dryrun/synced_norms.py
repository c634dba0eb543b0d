"""Shapes of the kernels behind ``SyncBatchNorm``, which torch 2.13 has for CUDA alone.

Each returns what the kernel allocates (ATen/native/cuda/Normalization.cu, from ``batch_norm_stats_cuda`` on): statistics of each
channel in fp32 beside 16-bit inputs, gradients of the weights' dtype, and results like the input.
"""

import torch

_LIBRARIES: list[torch.library.Library] = []
"""Keeps the registered kernels alive."""


def give_synced_norms_shapes() -> None:
    """Register the kernels' shapes for the rest of the process."""
    library = torch.library.Library("aten", "IMPL", "Meta")  # type: ignore[no-untyped-call]
    for name, kernel in _KERNELS.items():
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "Meta"):
            library.impl(name, kernel)  # type: ignore[no-untyped-call]
    _LIBRARIES.append(library)


def _of_each_channel(tensor: torch.Tensor) -> torch.Tensor:
    wide = torch.float64 if tensor.dtype is torch.float64 else torch.float32
    return tensor.new_empty(tensor.shape[1], dtype=wide)


def _two(tensor: torch.Tensor, *_: object) -> tuple[torch.Tensor, torch.Tensor]:
    return _of_each_channel(tensor), _of_each_channel(tensor)


def _normalised(tensor: torch.Tensor, *_: object) -> torch.Tensor:
    return torch.empty_like(tensor)


def _sums(
    _gradient: torch.Tensor, tensor: torch.Tensor, _mean: object, _root: object, weight: torch.Tensor | None, of_input: bool,  # noqa: FBT001  torch's order
    of_weight: bool, of_bias: bool,  # noqa: FBT001
) -> tuple[torch.Tensor | None, ...]:  # fmt: skip
    like = _of_each_channel(tensor) if weight is None else weight
    sums = _two(tensor) if of_input else (None, None)
    return (*sums, *(torch.empty_like(like) if wanted else None for wanted in (of_weight, of_bias)))


def _gradient_of_the_input(_gradient: torch.Tensor, tensor: torch.Tensor, *_: object) -> torch.Tensor:
    return torch.empty_like(tensor)


_KERNELS = {
    "batch_norm_stats": _two, "batch_norm_gather_stats_with_counts": _two, "batch_norm_elemt": _normalised,
    "batch_norm_backward_reduce": _sums, "batch_norm_backward_elemt": _gradient_of_the_input,
}  # fmt: skip
