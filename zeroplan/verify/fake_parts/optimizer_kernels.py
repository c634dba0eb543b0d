"""Fake-tensor implementations that torch's optimizers lack: fused in-place kernels, and the norms that Adafactor reads."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

import torch
from torch.optim import _adafactor

from zeroplan.verify.fake_parts.fake_mode import unknown_numbers
from zeroplan.verify.replaced import replaced

#: Kernels without a fake implementation (torch 2.11 to 2.15). On CUDA they request no memory that autograd or an engine sees
#: (``aten/src/ATen/native/cuda/FusedSgdKernel.cu`` and ``FusedAdagradKernel.cu``).
_IN_PLACE = ("_fused_sgd_", "_fused_adagrad_")
_STEPS = ("_single_tensor_adafactor", "_multi_tensor_adafactor")


@contextmanager
def optimizer_kernels() -> Iterator[None]:
    """Let fused SGD, fused Adagrad and Adafactor step over fake tensors.

    Adafactor reads every norm as 1, which changes its step but no size.
    """
    with ExitStack() as patches:
        for name in _IN_PLACE:
            patches.enter_context(replaced(torch, name, lambda *_, **__: None))
        for name in _STEPS:
            patches.enter_context(_reading_ones(name))
        yield


def _reading_ones(name: str) -> AbstractContextManager[None]:
    original: Callable[..., object] = getattr(_adafactor, name)

    def step(*args: object, **kwargs: object) -> object:
        with unknown_numbers(lambda _: 1.0):
            return original(*args, **kwargs)

    return replaced(_adafactor, name, step)
