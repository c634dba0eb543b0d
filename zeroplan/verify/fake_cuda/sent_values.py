"""Sends integers and booleans from one running rank to another, so that the receiver reads the sender's values.

A receive returns at once. The values are fetched when the receiver first reads them.
"""

import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, TypeVar, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeWork
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor

from zeroplan.verify.fake_cuda.known_values import Sure, await_values, how_sure, known
from zeroplan.verify.replaced import put

MessageT = TypeVar("MessageT")
_MOST_ELEMENTS = 1 << 18
"""Larger tensors are sent without values: they hold no shapes, and seldom a micro-batch's ids or masks."""
_KIND = "values"
_SEND, _RECEIVE = torch.ops.c10d.send.default, torch.ops.c10d.recv_.default
_ON_THE_HOST: list[Callable[[], object]] = []
"""Functions that fill real tensors on the host with received values, called when the script waits."""


class Messages(Protocol[MessageT]):
    """Carries messages between the ranks that run."""

    def send(self, to: int, group: Sequence[int], kind: str, content: bytes | None) -> None:
        """Send a message; without content, only count it."""
        ...

    def expect(self, sender: int, group: Sequence[int], kind: str) -> MessageT:
        """The next message from a rank."""
        ...

    def read(self, message: MessageT) -> bytes:
        """Wait for a message and return its content."""
        ...


def carry(messages: Messages[MessageT], func: OpOverload, args: Sequence[object]) -> bool:
    """Carry the values of a send or receive; return whether the operator is one."""
    if func not in (_SEND, _RECEIVE):
        return False
    group = dist.get_process_group_ranks(dist.ProcessGroup.unbox(cast("torch.ScriptObject", args[1])))
    place = cast("int", args[2])
    if place not in range(len(group)):
        return False
    peer = group[place]
    for tensor in cast("Sequence[torch.Tensor]", args[0]):
        has_values = not (tensor.is_floating_point() or tensor.is_complex()) and tensor.numel() <= _MOST_ELEMENTS
        if func is _SEND:
            messages.send(peer, group, _KIND, _content(tensor) if has_values else None)
            continue
        message = messages.expect(peer, group, _KIND)
        if has_values:
            _await(tensor, partial(_values, messages, message, tensor.dtype, tensor.shape))
    return True


def _content(tensor: torch.Tensor) -> bytes:
    values = known(tensor)
    return json.dumps(None if values is None else (int(how_sure(tensor)), values.flatten().tolist())).encode()


def _values(
    messages: Messages[MessageT], message: MessageT, dtype: torch.dtype, shape: torch.Size
) -> tuple[torch.Tensor, Sure] | None:  # fmt: skip
    """The sent values; None if the sender did not know them."""
    sent = json.loads(messages.read(message))
    if sent is None:
        return None
    sure, numbers = sent
    return torch.tensor(numbers, dtype=dtype).reshape(shape), Sure.EXCHANGED if sure else Sure.EXACT


def _await(tensor: torch.Tensor, read: Callable[[], tuple[torch.Tensor, Sure] | None]) -> None:
    if isinstance(tensor, FakeTensor):
        await_values(tensor, read)
    else:
        _ON_THE_HOST.append(lambda: _fill(tensor, read()))


def _fill(tensor: torch.Tensor, found: tuple[torch.Tensor, Sure] | None) -> None:
    if found is not None:
        tensor.copy_(found[0])


def fill_on_wait() -> None:
    """Fill real tensors on the host when the script waits for their receive."""
    original: Callable[..., bool] = FakeWork.wait

    def wait(work: FakeWork, *args: object, **kwargs: object) -> bool:
        while _ON_THE_HOST:
            _ON_THE_HOST.pop(0)()
        return original(work, *args, **kwargs)

    put(FakeWork, wait=wait)
