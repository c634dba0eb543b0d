"""Logs every collective of a rank: a process group that runs them on gloo or on torch's fake group.

Gloo's threads hold the tensors of a collective longer than the caller, and the profiler does not see their releases. Here every
call returns only when the collective has ended and gloo has released its tensors. A rank's memory is then what its own code
holds, as with NCCL. Bytes and results are gloo's.
"""

import sys
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup, ProcessGroupGloo, Store, Work, _create_work_from_future  # type: ignore[attr-defined]  # the last is in no stub
from torch.profiler import record_function
from torch.utils._python_dispatch import _disable_current_modes

from zeroplan.errors import MeasurementError
from zeroplan.verify.nested import bytes_of, dtype_name, largest_of, tensors_in
from zeroplan.verify.task import Transport
from zeroplan.verify.watching import nccl
from zeroplan.verify.watching.log import Call, Log

#: Names under which the profiler shows requests of the transport itself, on this thread and on gloo's.
TRANSPORT = ("zeroplan: transport", "gloo:")
_RELEASE_TIMEOUT_S = 60.0


class WatchedGroup(dist.ProcessGroup):
    """A process group around another one; its collectives end before they return."""

    def __init__(self, inner: object, ranks: tuple[int, int], log: Log) -> None:
        super().__init__(*ranks)  # type: ignore[call-arg, arg-type]  # the form for Python's own groups is in no stub
        self._inner, self._ranks, self._log = inner, ranks[1], log

    def size(self) -> int:
        """The number of ranks."""
        return self._ranks

    def getBackendName(self) -> str:  # noqa: N802  torch's name
        """The name under which torch registers the backend."""
        return "watched"

    @property
    def group_name(self) -> str:  # type: ignore[override]  # torch's own alias of a text
        """The name under which torch registered this group."""
        return dist.distributed_c10d._world.pg_names[self]

    def _start_coalescing(self, _device: torch.device) -> None:
        """Do nothing: collectives run one by one."""

    def _end_coalescing(self, _device: torch.device) -> Work:
        return _ended([])

    def run_and_log(self, operation: str, run: Callable[..., Work], arguments: tuple[object, ...]) -> Work:
        """Run a collective to its end and log it; dispatch modes do not see the transport's own requests."""
        if largest := largest_of(arguments):
            self._log.calls.append(Call(operation, dtype_name(largest[0]), self._ranks, bytes_of(largest), self._log.phase))
        buffers = list(tensors_in(arguments))
        before = _holders(buffers)
        with record_function(TRANSPORT[0]), _disable_current_modes():
            run(*arguments).wait()
            _await_release(buffers, before)
        return _ended(list(tensors_in(arguments[0])) if operation in ("all_reduce", "broadcast") else [])

    def send(self, tensors: list[torch.Tensor], destination: int, tag: int) -> Work:
        """Send to one rank and log it, without waiting: a send ends only when the other rank has received."""
        self._log.calls.append(Call("send", dtype_name(tensors[0]), self._ranks, tensors[0].nbytes, self._log.phase))
        return self._peer("send", tensors, destination, tag)

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> Work:
        """Receive from one rank."""
        return self._peer("recv", tensors, source, tag)

    def _peer(self, operation: str, tensors: list[torch.Tensor], peer: int, tag: int) -> Work:
        run: Callable[..., Work] = getattr(self._inner, operation)
        with record_function(TRANSPORT[0]):
            return run(tensors, peer, tag)

    @property
    def inner(self) -> object:
        """The wrapped group, which does the work."""
        return self._inner


#: DTensor calls these with lists of one tensor; no transport offers them in Python. The other method runs once per tensor.
_OF_LISTS = {
    "allgather_into_tensor_coalesced": "_allgather_base", "reduce_scatter_tensor_coalesced": "_reduce_scatter_base",
}  # fmt: skip


def _one_by_one(inner: object, names: tuple[str, ...]) -> Callable[..., Work] | None:
    each: Callable[..., Work] | None = getattr(inner, _OF_LISTS.get(names[-1], ""), None)
    if each is None:
        return None

    def run(outputs: list[torch.Tensor], inputs: list[torch.Tensor], *arguments: object) -> Work:
        for made, given in zip(outputs, inputs, strict=True):
            each(made, given, *arguments).wait()
        return _ended(outputs)

    return run


def _method(operation: str, names: tuple[str, ...]) -> Callable[..., Work]:
    def collective(self: WatchedGroup, *arguments: object, **options: object) -> Work:
        run = next((found for name in names if (found := getattr(self.inner, name, None))), None)
        run = run or _one_by_one(self.inner, names)
        if run is None:
            raise MeasurementError(f"zeroplan does not know this torch's {operation}; install a tested release of torch")
        return self.run_and_log(operation, lambda *given: run(*given, **options), arguments)

    return collective


#: Every collective: its name in ledgers, and the method names that torch uses for it (newer ones first).
_COLLECTIVES: dict[str, tuple[tuple[str, ...], ...]] = {
    "all_reduce": (("allreduce",), ("allreduce_coalesced",)),
    "broadcast": (("broadcast",),),
    "reduce": (("reduce",),),
    "all_gather": (("allgather",), ("allgather_coalesced",), ("all_gather_single", "_allgather_base"),
                   ("all_gather_single_coalesced", "allgather_into_tensor_coalesced")),
    "reduce_scatter": (("reduce_scatter",), ("reduce_scatter_single", "_reduce_scatter_base"),
                       ("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced")),
    "gather": (("gather",),),
    "scatter": (("scatter",),),
    "all_to_all": (("alltoall",), ("all_to_all_single", "alltoall_base")),
    "barrier": (("barrier",),),
}  # fmt: skip

for _operation, _spellings in _COLLECTIVES.items():
    for _names in _spellings:
        for _name in _names:
            setattr(WatchedGroup, _name, _method(_operation, _names))


def _ended(tensors: list[torch.Tensor]) -> Work:
    future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
    future.set_result(tensors)
    work: Work = _create_work_from_future(future)
    return work


def _holders(buffers: list[torch.Tensor]) -> list[int]:
    """The number of references to each tensor, its storage and its Python object.

    Gloo's worker releases the tensor first, then waits for Python's lock to release the object. Counting tensors alone would let
    the worker free the object later, unseen.
    """
    return [
        sys.getrefcount(tensor) + tensor._use_count() + torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)  # type: ignore[attr-defined]
        for tensor in buffers
    ]


def _await_release(buffers: list[torch.Tensor], before: list[int]) -> None:
    until = time.monotonic() + _RELEASE_TIMEOUT_S
    while any(now > then for now, then in zip(_holders(buffers), before, strict=True)):
        if time.monotonic() > until:
            raise MeasurementError(
                f"gloo still held a buffer {_RELEASE_TIMEOUT_S:g} s after its collective, which spoils the record; run it again"
            )
        time.sleep(0)


def join(transport: Transport, store: Store, *, rank: int, ranks: int, timeout_s: float) -> Log:
    """Make this process a rank of the default process group, and return the log of its collectives.

    NCCL's own group is used unchanged; its calls are read after the run (:mod:`zeroplan.verify.watching.nccl`).
    """
    log = Log()
    if transport == "nccl":
        nccl.join(store, rank=rank, ranks=ranks, timeout_s=timeout_s)
        return log

    def group(store: Store, rank: int, ranks: int, timeout: timedelta) -> WatchedGroup:
        if transport == "gloo":
            return WatchedGroup(ProcessGroupGloo(store, rank, ranks, timeout), (rank, ranks), log)
        fake = FakeProcessGroup._create_internal(rank, ranks, FakeProcessGroup.Options())  # type: ignore[call-arg]
        return WatchedGroup(fake, (rank, ranks), log)

    dist.Backend.register_backend("watched", group, devices=["cpu", "cuda"])
    dist.init_process_group("watched", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=timeout_s))
    return log
