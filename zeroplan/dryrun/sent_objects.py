"""Sends Python objects between ranks; their tensors keep everything except floating-point values."""

import io
import pickle
from collections.abc import Callable, MutableSequence, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor

from zeroplan.dryrun.rank_messages import RankMessages
from zeroplan.errors import MeasurementError
from zeroplan.verify.fake_cuda.known_values import Sure, keep, known

_KIND = "objects"
Function = Callable[..., object]


def object_functions(messages: RankMessages) -> dict[str, Function]:
    """Torch's ``send_object_list`` and ``recv_object_list``, between ranks that run at the same time."""

    def send(
        object_list: Sequence[object], dst: int | None = None, group: dist.ProcessGroup | None = None, device: object = None,  # noqa: ARG001
        group_dst: int | None = None, use_batch: bool = False,  # noqa: ARG001, FBT001, FBT002  torch's signature
    ) -> None:  # fmt: skip
        ranks, peer = _peer(group, dst, group_dst)
        messages.send(peer, ranks, _KIND, _packed(list(object_list)))

    def receive(
        object_list: MutableSequence[object], src: int | None = None, group: dist.ProcessGroup | None = None, device: object = None,  # noqa: ARG001
        group_src: int | None = None, use_batch: bool = False,  # noqa: ARG001, FBT001, FBT002  torch's signature
    ) -> int:  # fmt: skip
        ranks, peer = _peer(group, src, group_src)
        object_list[:] = cast("list[object]", _unpacked(messages.read(messages.expect(peer, ranks, _KIND)), peer))
        return peer

    return {"send_object_list": send, "recv_object_list": receive}


def pass_over(messages: RankMessages, sender: int, group: dist.ProcessGroup | None) -> None:
    """Skip objects that a rank sends and this rank does not need."""
    messages.expect(sender, _peer(group, sender, None)[0], _KIND)


def _peer(group: dist.ProcessGroup | None, rank: int | None, within: int | None) -> tuple[list[int], int]:
    """The ranks of a group, and the global rank of one that is named by global rank or by its position in the group."""
    ranks = dist.get_process_group_ranks(group)
    if rank is None and within is None:
        raise MeasurementError(
            "the script receives objects (torch.distributed.recv_object_list) from any rank, and a dry run does not know which one "
            "sends first; name its rank with src="
        )
    return ranks, ranks[within] if within is not None else cast("int", rank)


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: object) -> Any:  # noqa: ANN401  as pickle has it
        """Pickle a tensor without bytes by its shape."""
        if not isinstance(value, FakeTensor):
            return NotImplemented
        numbers = known(value)
        return _tensor, (
            tuple(value.shape), value.stride(), value.dtype, value.device.type, value.requires_grad,
            None if numbers is None else numbers.tolist(),
        )  # fmt: skip


def _tensor(
    shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, device: str, wants_gradient: bool, numbers: object,  # noqa: FBT001
) -> torch.Tensor:  # fmt: skip
    made = torch.empty_strided(shape, stride, dtype=dtype, device=device).requires_grad_(wants_gradient)
    if numbers is not None and isinstance(made, FakeTensor):
        keep(made, torch.tensor(numbers, dtype=dtype).reshape(shape), Sure.EXACT)
    return made


def _packed(objects: list[object]) -> bytes:
    """The pickled objects, or the error text if pickling fails; the receiver raises that error."""
    buffer = io.BytesIO()
    try:
        _Pickler(buffer).dump(objects)
    except Exception as error:  # noqa: BLE001  a script's object may raise anything
        return pickle.dumps(f"{type(error).__name__}: {' '.join(str(error).split())}")
    return buffer.getvalue()


def _unpacked(content: bytes, sender: int) -> object:
    found = pickle.loads(content)  # noqa: S301  from a process of this run
    if isinstance(found, str):
        raise MeasurementError(f"rank {sender} sends objects that cannot be pickled ({found}); send picklable objects")
    return found
