"""What scripts import of ``deep_ep``: its buffer for experts' tokens, and the types around it.

Source: DeepEP of July 2026, ``deep_ep/buffers/legacy.py`` and ``csrc/legacy/buffer.hpp``: the interface of versions 1 and, beside a
new one, 2.
"""

import torch

from .buffer import Buffer
from .config import Config
from .utils import EventHandle, EventOverlap

topk_idx_t = torch.int64
"""What the experts' numbers are."""


def __getattr__(name: str) -> object:
    if name.startswith("__"):
        raise AttributeError(name)
    raise ImportError(f"deep_ep.{name} has no double in a dry run; take Buffer")


__all__ = ["Buffer", "Config", "EventHandle", "EventOverlap", "topk_idx_t"]
