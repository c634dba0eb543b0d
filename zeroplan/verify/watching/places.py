"""Reports which block is running, for watchers that see operators only."""

from collections.abc import Callable
from contextlib import ExitStack

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from zeroplan.verify.nested import tensors_in
from zeroplan.verify.watching.recording import layer_named

Say = Callable[[int | None], None]


class Places:
    """Calls ``say`` with a block's number when its forward or backward begins, and with None outside all blocks.

    A hook on a block's output runs before those of engines, which gather in theirs, and adds no node to autograd's graph.
    """

    def __init__(self, say: Say) -> None:
        self._say = say
        self._layers: dict[int, int | None] = {}
        self._hooks = ExitStack()

    def __enter__(self) -> None:
        for handle in (register_module_forward_pre_hook(self._entered), register_module_forward_hook(self._left)):
            self._hooks.callback(handle.remove)

    def __exit__(self, *error: object) -> None:
        self._hooks.close()

    def name(self, root: nn.Module) -> None:
        """Watch the blocks of a model, and the modules beside them."""
        names = dict(root.named_modules())
        for name, module in names.items():
            layer = layer_named(name)
            if layer is not None and name.rpartition(".")[2] == str(layer):
                self._layers[id(module)] = layer
            elif layer is None and not any(layer_named(f"{name}.{inside}") is not None for inside, _ in module.named_modules()):
                self._layers[id(module)] = None

    def _entered(self, module: nn.Module, _args: object) -> None:
        if id(module) in self._layers:
            self._say(self._layers[id(module)])

    def _left(self, module: nn.Module, _args: object, result: object) -> None:
        if id(module) not in self._layers or not torch.is_grad_enabled():
            return
        layer = self._layers[id(module)]
        first = next((tensor for tensor in tensors_in(result) if tensor.requires_grad), None)
        if first is not None:
            first.register_hook(lambda _: self._say(layer))  # type: ignore[no-untyped-call]  # torch leaves it untyped
