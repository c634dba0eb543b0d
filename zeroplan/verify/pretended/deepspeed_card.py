"""The pretended GPU as DeepSpeed asks for one: its CUDA accelerator, whose device is the card.

DeepSpeed reaches every device through one object (``deepspeed.accelerator``) and lets anybody set it. What decides which way its
code goes (streams, whether work runs behind the host's back, memory to be pinned) is inherited from CUDA's.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from deepspeed.accelerator import get_accelerator, set_accelerator
from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator

from zeroplan.verify.pretended.card import CARD, always, streams


@contextmanager
def on_the_card() -> Iterator[None]:
    """Have DeepSpeed take the card for its GPU; afterwards it has the device it had."""
    before = get_accelerator()
    set_accelerator(_Card())
    try:
        yield
    finally:
        set_accelerator(before)


class _Card(CUDA_Accelerator):  # type: ignore[misc]  # DeepSpeed has no types
    """CUDA's answers for one device that computes nothing and never runs out of memory."""

    def __init__(self) -> None:
        super().__init__()
        self._name, self._communication_backend_name = CARD, "fake"

    def device_name(self, device_index: int | None = None) -> str:
        return CARD if device_index is None else f"{CARD}:{device_index}"

    def device(self, device_index: int | None = None) -> torch.device:
        return torch.device(CARD, device_index or 0)

    def current_device_name(self) -> str:
        return self.device_name(0)

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == CARD

    def _torch_empty_pinned(self, tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        return tensor.new_empty(shape)

    def _torch_is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == "cpu"


_PLENTY = 2**62
_ANSWERS: dict[str, object] = {
    "is_available": True, "device_count": 1, "current_device": 0, "set_device": None, "synchronize": None,
    "is_bf16_supported": True, "is_fp16_supported": True, "is_triton_supported": False, "prefer_triton_grouped_mm": False,
    "memory_allocated": 0, "max_memory_allocated": 0, "reset_max_memory_allocated": None, "memory_reserved": 0,
    "max_memory_reserved": 0, "memory_cached": 0, "max_memory_cached": 0, "reset_max_memory_cached": None, "memory_stats": {},
    "reset_peak_memory_stats": None, "total_memory": _PLENTY, "available_memory": _PLENTY, "empty_cache": None,
    "manual_seed": None, "manual_seed_all": None, "initial_seed": 0, "range_push": None, "range_pop": None, "lazy_call": None,
}  # fmt: skip
_TENSORS = {
    "BFloat16Tensor": torch.bfloat16, "ByteTensor": torch.uint8, "DoubleTensor": torch.float64, "FloatTensor": torch.float32,
    "HalfTensor": torch.float16, "IntTensor": torch.int32, "LongTensor": torch.int64,
}  # fmt: skip
for _name, _answer in _ANSWERS.items():
    setattr(_Card, _name, always(_answer))
for _name, _dtype in _TENSORS.items():
    setattr(_Card, _name, staticmethod(partial(torch.tensor, dtype=_dtype, device=CARD)))
for _name, _made in streams().items():
    setattr(_Card, _name, staticmethod(_made))
