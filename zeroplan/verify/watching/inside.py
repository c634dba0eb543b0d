"""Operators of other libraries whose CUDA kernels are Python that asks torch for memory: what a tracker sees inside them."""

from collections.abc import Callable

from torch._ops import OpOverload

INSIDE: dict[OpOverload, Callable[..., object]] = {}
"""By operator, what it does on a GPU, written in torch's operators."""
