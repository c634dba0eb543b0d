"""What a script's model is called with in a training step, and what the loop does with its output: seen while the script runs."""

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
    """One call of the model: its arguments, each tensor described, and in which dtype autocast computes around it.

    A tensor that occurs several times is described once; later occurrences refer to the first.
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
    """Watches one model from its second call on, which is when it is known which model that is."""

    def __init__(self) -> None:
        self.root: nn.Module | None = None
        """Kept once the last step is taken: what a script drops before that is gone."""
        self.optimizer: Optimizer | None = None
        self.call: Call | None = None
        self.tape: Tape | None = None
        self.inside: torch.dtype | None = None
        """In which dtype autocast computes in the blocks."""
        self.blocks = False
        """Whether the model has blocks to look into."""
        self.models = 0
        self.backwards = 0
        """Backward passes of the last step."""
        self.recomputes = False
        self.syncs = True
        """Whether every backward of the last step reduced its gradients."""
        self._arguments: dict[int, weakref.ref[torch.Tensor]] = {}
        self._calls = self._in_step = 0
        self.most_calls = 0
        """Calls of the model before one backward."""

    def meet(self, root: nn.Module) -> None:
        """A model that is trained."""
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
        self._leave()
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
            return  # a mode of the script's own is around the call, and modes are left in their order
        self.tape = Tape(list(tensors_within(output)), self._arguments)
        self.tape.__enter__()  # type: ignore[no-untyped-call]

    def backward_begins(self, roots: Sequence[torch.Tensor], root: nn.Module | None) -> None:
        """The outermost backward begins from these tensors."""
        self._calls = 0
        self._in_step += 1
        self.syncs = self.syncs and (root is None or _reduces(root))
        if self.tape is not None and self.tape.open:
            self.tape.close(roots[0])

    def step_begins(self) -> None:
        """The optimizer's step begins; the script's own calls are no part of a tape."""
        self._leave()

    def step_ended(self, optimizer: Optimizer | None, root: nn.Module | None, *, last: bool) -> None:
        """A whole step is taken, by this optimizer among others, or by an engine."""
        if optimizer is not None and optimizer.state:
            self.optimizer = optimizer
        self.backwards, self._in_step = self._in_step or self.backwards, 0
        if last:
            self.root = root

    def _leave(self) -> None:
        """Take the tape off torch's stack of modes, wherever it lies."""
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
    """``[1]['input_ids']`` as ``input_ids``, ``[0][0]`` as ``argument 1``."""
    rest = path.partition("]")[2]
    if not path.startswith("[0]"):
        return rest.replace("['", "").replace("']", ".").rstrip(".") or "argument"
    return f"argument {int(rest[1 : rest.index(']')]) + 1}"


def _autocast() -> torch.dtype | None:
    return torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None


def _reduces(root: nn.Module) -> bool:
    """Whether a backward reduces gradients (not so in ``no_sync``)."""
    for wrapper in wrappers(root):
        if is_deepspeed(wrapper):
            return True
        if not getattr(wrapper, "require_backward_grad_sync", True):
            return False
    groups = (group for module in root.modules() if isinstance(module, FSDPModule) for group in groups_of(module))
    return all(group.reduce_grads for group in groups)
