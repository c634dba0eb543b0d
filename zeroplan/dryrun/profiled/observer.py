"""With which arguments does a script call its model, and how does the loop compute the loss from the output?"""

import weakref
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim.optimizer import Optimizer
from torch.overrides import _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils._device import DeviceContext
from torch.utils._pytree import TreeSpec, keystr, tree_flatten_with_path

from zeroplan.dryrun.profiled.bare import model_in, wrappers
from zeroplan.dryrun.profiled.settings import groups_of, is_deepspeed
from zeroplan.dryrun.profiled.shapes import Given, given
from zeroplan.dryrun.profiled.tape import Argument, Tape, tensors_within
from zeroplan.verify.training.modules import find_blocks


class Call(NamedTuple):
    """One call of the model: its arguments, with tensors described, and the dtype of autocast around it.

    A repeated tensor is described once; later occurrences refer to the first.
    """

    leaves: tuple[object, ...]
    names: tuple[str, ...]
    form: TreeSpec
    autocast: torch.dtype | None

    @property
    def tensors(self) -> list[tuple[str, Given]]:
        """The tensors among the arguments, by name."""
        return [(name, one) for name, one in zip(self.names, self.leaves, strict=True) if isinstance(one, Given)]


class Observer:
    """Watches one model from its second call on; the first call identifies the model."""

    def __init__(self) -> None:
        self.root: nn.Module | None = None
        """Set at the last step only, so that the script can free models before."""
        self.optimizer: Optimizer | None = None
        self.call: Call | None = None
        self.tape: Tape | None = None
        self.inside: torch.dtype | None = None
        """The dtype of autocast inside the blocks."""
        self.blocks = False
        """Whether the model has a list of blocks."""
        self.models = 0
        self.backwards = 0
        """Backward passes of the last step."""
        self.recomputes = False
        self.syncs = True
        """Whether every backward of the last step reduced its gradients."""
        self._arguments: dict[int, weakref.ref[torch.Tensor]] = {}
        self._calls = self._in_step = 0
        self.most_calls = 0
        """The most calls of the model before one backward."""

    def meet(self, root: nn.Module) -> None:
        """Watch a model that is trained."""
        self.models += 1
        model = model_in(root)
        model.register_forward_pre_hook(self._called, with_kwargs=True)
        model.register_forward_hook(self._returned)
        for block in find_blocks(model)[:1]:
            self.blocks = True
            block.register_forward_pre_hook(self._in_a_block)

    def _called(self, _: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        self._calls += 1
        self.most_calls = max(self.most_calls, self._calls)
        self.step_begins()
        found, form = tree_flatten_with_path((args, kwargs))
        leaves = [one for _, one in found]
        self._arguments = {at: weakref.ref(one) for at, one in enumerate(leaves) if isinstance(one, torch.Tensor)}
        self.call = Call(
            tuple(_described(leaves, at) for at in range(len(leaves))),
            tuple(_name(keystr(path)) for path, _ in found),
            form,
            _autocast(),
        )

    def _in_a_block(self, *_: object) -> None:
        self.inside = _autocast()

    def _returned(self, _: nn.Module, _args: object, output: object) -> None:
        self.tape = None
        if not all(isinstance(mode, DeviceContext) for mode in _modes()):
            return  # modes end in order, and the script's own mode surrounds the call
        self.tape = Tape(list(tensors_within(output)), self._arguments)
        self.tape.__enter__()  # type: ignore[no-untyped-call]

    def backward_begins(self, roots: Sequence[torch.Tensor], root: nn.Module | None) -> None:
        """Close the tape at the outermost backward of these tensors."""
        self._calls = 0
        self._in_step += 1
        self.syncs = self.syncs and (root is None or _reduces(root))
        if self.tape is not None and self.tape.open:
            self.tape.close(roots[0])

    def step_ended(self, optimizer: Optimizer | None, root: nn.Module | None, *, last: bool) -> None:
        """Note a whole step by this optimizer, or by an engine."""
        if optimizer is not None and optimizer.state:
            self.optimizer = optimizer
        self.backwards, self._in_step = self._in_step or self.backwards, 0
        if last:
            self.root = root

    def step_begins(self) -> None:
        """Stop recording at the optimizer's step: remove the tape from torch's stack of modes, at any depth."""
        if self.tape is None:
            return
        self.tape.open = False
        modes = _modes()
        if not any(mode is self.tape for mode in modes):
            return
        for _ in modes:
            _pop_mode()  # type: ignore[no-untyped-call]
        for mode in modes:
            if mode is not self.tape:
                _push_mode(mode)  # type: ignore[no-untyped-call]


def _modes() -> list[object]:
    """Torch's function modes, the lowest first."""
    return list(_get_current_function_mode_stack())  # type: ignore[no-untyped-call]


def _described(leaves: Sequence[object], at: int) -> object:
    one = leaves[at]
    if not isinstance(one, torch.Tensor):
        return one
    first = next(place for place, other in enumerate(leaves) if other is one)
    return given(one) if first == at else Argument(first)


def _name(path: str) -> str:
    """An argument's name: ``[1]['input_ids']`` as ``input_ids``, ``[0][0]`` as ``argument 1``."""
    rest = path.partition("]")[2]
    if not path.startswith("[0]"):
        return rest.replace("['", "").replace("']", ".").rstrip(".") or "argument"
    return f"argument {int(rest[1 : rest.index(']')]) + 1}"


def _autocast() -> torch.dtype | None:
    return torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None


def _reduces(root: nn.Module) -> bool:
    """Whether a backward reduces gradients, as it does outside ``no_sync``."""
    for wrapper in wrappers(root):
        if is_deepspeed(wrapper):
            return True
        if not getattr(wrapper, "require_backward_grad_sync", True):
            return False
    groups = (group for module in root.modules() if isinstance(module, FSDPModule) for group in groups_of(module))
    return all(group.reduce_grads for group in groups)
