"""Operators of libraries whose CUDA kernels are Python that allocates through torch, with the operators they run."""

from collections.abc import Callable

from torch._ops import OpOverload

INSIDE: dict[OpOverload, Callable[..., object]] = {}
"""For each operator, the function that makes its GPU allocations with torch's operators."""
