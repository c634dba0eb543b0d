"""A double of ``deep_ep``: its buffer for experts' tokens, and the types around it.

Source: DeepEP of July 2026, ``deep_ep/buffers/legacy.py`` and ``csrc/legacy/buffer.hpp``: the interface of version 1, which
version 2 keeps beside a new one.
"""

import torch

from zeroplan.engines.deep_ep import Config

from .buffer import Buffer
from .utils import EventHandle, EventOverlap

topk_idx_t = torch.int64
"""The dtype of expert indices."""


def __getattr__(name: str) -> object:
    if name.startswith("__"):
        raise AttributeError(name)
    raise ImportError(f"deep_ep.{name} is not supported in a dry run; use Buffer")


__all__ = ["Buffer", "Config", "EventHandle", "EventOverlap", "topk_idx_t"]
