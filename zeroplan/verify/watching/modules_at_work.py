"""Which module is running when an operator is called, in forward or backward?"""

from bisect import bisect_right
from contextlib import ExitStack

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook


class ModulesAtWork:
    """Tracks the running module; in backward, the module whose forward made the autograd node.

    Autograd numbers its nodes in order. The numbers at which modules are entered and left identify the module of a node.
    """

    def __init__(self) -> None:
        self.names: dict[int, str] = {}
        self._calls: list[str] = []
        self._numbers: list[int] = []
        self._whose: list[str] = []
        self._hooks = ExitStack()

    def __enter__(self) -> None:
        for handle in (
            register_module_forward_pre_hook(self._entered),
            register_module_forward_hook(self._left, always_call=True),
        ):
            self._hooks.callback(handle.remove)

    def __exit__(self, *error: object) -> None:
        self._hooks.close()

    @property
    def is_called(self) -> bool:
        """Whether a module's forward is running; within a backward, that is a recomputation."""
        return bool(self._calls)

    def current(self) -> str:
        """The fully qualified name of the running module; empty outside all modules or if unknown."""
        if self._calls:
            return self._calls[-1]
        node: torch.autograd.graph.Node | None = torch._C._current_autograd_node()
        if not self._numbers or node is None:
            return ""
        return self._whose[bisect_right(self._numbers, node._sequence_nr()) - 1]

    def _entered(self, module: nn.Module, _args: object) -> None:
        name = self.names.get(id(module))
        if name is not None:
            self._calls.append(name)
            self._note(name)

    def _left(self, module: nn.Module, _args: object, _result: object) -> None:
        if id(module) in self.names and self._calls:
            self._calls.pop()
            self._note(self._calls[-1] if self._calls else "")

    def _note(self, name: str) -> None:
        self._numbers.append(torch._C._autograd._get_sequence_nr())
        self._whose.append(name)
