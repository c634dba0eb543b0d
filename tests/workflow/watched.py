"""Sums the tensors of a CPU that are alive."""

from __future__ import annotations

import weakref
from typing import Any

import pytest

torch = pytest.importorskip("torch")


class Watch(torch.utils._python_dispatch.TorchDispatchMode):  # type: ignore[misc, name-defined]
    """Sums the storages that operators have made and that are alive."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, operator: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = operator(*args, **(kwargs or {}))
        for one in torch.utils._pytree.tree_leaves(made):
            if isinstance(one, torch.Tensor) and (key := (storage := one.untyped_storage())._cdata) not in self.alive:
                self.alive[key] = storage.nbytes()
                weakref.finalize(storage, self.alive.pop, key, None)
        self.peak = max(self.peak, self.now)
        return made

    @property
    def now(self) -> int:
        """The bytes alive now."""
        return sum(self.alive.values())
