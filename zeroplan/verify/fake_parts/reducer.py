"""Lets the reducer of ``DistributedDataParallel`` read its integers although all other tensors are fake.

Its C++ stores parameter shapes and bucket assignments in integer tensors, sends them to other ranks and reads the result. These
few tensors are real; parameters, gradients and buckets stay fake. The record omits them: four or eight bytes per parameter or
dimension, partly in host memory, freed before the next bucket is made.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import torch
from torch._C._distributed_c10d import Reducer
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.nn.parallel import distributed
from torch.utils._python_dispatch import TorchDispatchMode

from zeroplan.verify.nested import tensors_in
from zeroplan.verify.replaced import replaced
from zeroplan.verify.watching.collectives import COLLECTIVES
from zeroplan.verify.watching.watcher import Watcher

#: Functions that write and read such tensors (torch 2.13): the constructor's check, and the rebuild in the second forward.
_READERS: tuple[tuple[object, str], ...] = (
    (distributed, "_verify_param_shape_across_processes"),
    (Reducer, "_rebuild_buckets"),
)
_WRITTEN_IN = (torch.int32, torch.int64)


@contextmanager
def real_reducer_integers(watcher: Watcher) -> Iterator[None]:
    """Give DDP's reducer real integer tensors; the watcher records only that they are sent."""
    with ExitStack() as patches:
        for owner, name in _READERS:
            patches.enter_context(_on_real_integers(owner, name, watcher))
        yield


def _on_real_integers(owner: object, name: str, watcher: Watcher) -> AbstractContextManager[None]:
    original: Callable[..., object] = getattr(owner, name)

    def reading(*args: object) -> object:
        with _RealIntegers(watcher):
            return original(*args)

    return replaced(owner, name, reading)


class _RealIntegers(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves its modes untyped
    """Makes integer tensors real, and runs operators on real tensors for real."""

    def __init__(self, watcher: Watcher) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._watcher = watcher

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: tuple[object, ...] = (), kwargs: Mapping[str, object] | None = None
    ) -> object:
        options = kwargs or {}
        if not _is_real(args, options):
            return func(*args, **options)
        if "device" in options:
            options = {**options, "device": torch.device("cpu")}  # the reducer's device may be the fake GPU
        with unset_fake_temporarily(), nullcontext() if func in COLLECTIVES else self._watcher.not_recording():
            return func(*args, **options)


def _is_real(args: tuple[object, ...], options: Mapping[str, object]) -> bool:
    tensors = list(tensors_in((args, options)))
    if not tensors:
        return options.get("dtype") in _WRITTEN_IN
    return not any(isinstance(one, FakeTensor) for one in tensors)
