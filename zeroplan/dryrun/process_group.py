"""Replaces a script's process groups by torch's fake one, which reports the backend NCCL.

A fake group moves no data: every collective returns at once, with the right shapes. Python objects from other ranks equal this
rank's, since all ranks run the same program. For point-to-point messages zeroplan runs the sending rank as well.
"""

import os
from collections.abc import Callable, MutableSequence

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeWork
from torch.distributed import device_mesh
from torch.distributed import distributed_c10d as c10d
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from zeroplan.dryrun.rank_messages import RankMessages
from zeroplan.dryrun.replacements import noting
from zeroplan.dryrun.sent_objects import object_functions
from zeroplan.errors import SpecError
from zeroplan.verify.fake_cuda.exchanged import noting_sums
from zeroplan.verify.fake_cuda.sent_values import fill_on_wait
from zeroplan.verify.fake_parts.held_sends import hold_sent_tensors
from zeroplan.verify.replaced import always, put
from zeroplan.verify.training.ddp import reduce_bucket

_WHERE = (dist, c10d, device_mesh)


def make_groups_fake(messages: RankMessages) -> None:
    """Make every process group a fake one that reports the backend NCCL."""
    name_groups_nccl("fake")
    for owner in _WHERE:
        put(owner, **object_functions(messages))
    fill_on_wait()
    hold_sent_tensors()
    _reduce_buckets_at_once()
    _coalesce()


def name_groups_nccl(backend: str) -> None:
    """Make every process group of the script use this backend in this process alone, and report the backend NCCL."""
    answers: dict[str, object] = {
        "init_process_group": _init(c10d.init_process_group, backend), "new_group": _new_group(c10d.new_group),
        "get_backend": always("nccl"), "is_nccl_available": always(True), "all_gather_object": _fill,
        "gather_object": _fill_at_one, "scatter_object_list": _scatter, "broadcast_object_list": always(None),
        "barrier": always(None), "monitored_barrier": always(None), "send_object_list": always(None), "recv_object_list": _unknown,
        "_set_pg_timeout": always(None), "all_reduce": noting_sums(c10d.all_reduce),
    }  # fmt: skip
    for owner in _WHERE:
        put(owner, **answers)
    if not hasattr(dist, "set_timeout"):  # torchtitan 0.3 calls it, torch 2.13 lacks it
        dist.set_timeout = always(None)  # type: ignore[attr-defined]


_LIBRARIES: list[torch.library.Library] = []
"""Keeps the registered kernels alive."""
_COALESCED = ("allreduce_coalesced_", "reduce_scatter_tensor_coalesced_", "allgather_into_tensor_coalesced_")
"""Coalesced collectives: NCCL works in place, and torch has no kernel for tensors without bytes."""


def _coalesce() -> None:
    library = torch.library.Library("c10d", "IMPL", "Meta")  # type: ignore[no-untyped-call]
    for name in _COALESCED:
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"c10d::{name}", "Meta"):
            library.impl(name, lambda *_, **__: FakeWork().boxed())  # type: ignore[no-untyped-call]
    _LIBRARIES.append(library)


def _init(start: Callable[..., None], name: str) -> Callable[..., None]:
    def init_process_group(
        backend: str | None = None, init_method: str | None = None, timeout: object = None, world_size: int | None = -1,  # noqa: ARG001
        rank: int | None = -1, store: object = None, group_name: str = "", *_: object, **__: object,  # noqa: ARG001
    ) -> None:  # fmt: skip
        ranks = int(os.environ.get("WORLD_SIZE", "1")) if world_size in (-1, None) else world_size
        mine = int(os.environ.get("RANK", "0")) if rank in (-1, None) else rank
        start(name, rank=mine, world_size=ranks, store=FakeStore())

    return init_process_group


def _new_group(new: Callable[..., object]) -> Callable[..., object]:
    def new_group(ranks: object = None, timeout: object = None, backend: object = None, *_: object, **others: object) -> object:  # noqa: ARG001
        rest = {name: value for name, value in others.items() if name not in ("pg_options", "device_id")}
        return new(ranks=ranks, timeout=None, backend=None, **rest)

    return new_group


def _unknown(*_: object, **__: object) -> None:
    raise SpecError(
        "the script receives objects (torch.distributed.recv_object_list) from a rank that does not run here; leave it out for the "
        "dry run, or name a rank that sends them (--as-rank)"
    )


def _fill(object_list: MutableSequence[object], obj: object, *_: object, **__: object) -> None:
    for index in range(len(object_list)):
        object_list[index] = obj


def _fill_at_one(obj: object, object_gather_list: MutableSequence[object] | None = None, *_: object, **__: object) -> None:
    if object_gather_list is not None:
        _fill(object_gather_list, obj)


def _scatter(
    scatter_object_output_list: MutableSequence[object], scatter_object_input_list: MutableSequence[object] | None = None,
    *_: object, **__: object,
) -> None:  # fmt: skip
    if scatter_object_input_list:
        mine = scatter_object_input_list[dist.get_rank() % len(scatter_object_input_list)]
        scatter_object_output_list[0] = mine


def _reduce_buckets_at_once() -> None:
    """Make DDP reduce buckets by a hook, since its C++ cannot read a fake group's result; this replaces the script's own hook."""
    made, register = DistributedDataParallel.__init__, DistributedDataParallel.register_comm_hook

    def init(wrapper: DistributedDataParallel, *args: object, **kwargs: object) -> None:
        made(wrapper, *args, **kwargs)  # type: ignore[arg-type]
        register(wrapper, None, reduce_bucket)

    left_out = noting("DDP's communication hook", "buckets are all-reduced at once, as without a hook", always(None))
    put(DistributedDataParallel, __init__=init, register_comm_hook=left_out)
