"""Describes calls of collectives: operation, dtype, bytes and number of ranks."""

from typing import cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _resolve_process_group
from torch._ops import OpOverload

from zeroplan.verify.nested import bytes_of, dtype_name, largest_of
from zeroplan.verify.watching.recording import Call

_NAMES = {
    "allgather_": "all_gather", "_allgather_base_": "all_gather", "allgather_coalesced_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "reduce_scatter_": "reduce_scatter", "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "allreduce_": "all_reduce", "allreduce_coalesced_": "all_reduce",
    "broadcast_": "broadcast", "reduce_": "reduce", "gather_": "gather", "scatter_": "scatter",
    "alltoall_": "all_to_all", "alltoall_base_": "all_to_all", "send": "send",
}  # fmt: skip
#: The operators behind ``torch.distributed``, with the names of its functions.
COLLECTIVES: dict[OpOverload, str] = {
    getattr(torch.ops.c10d, name).default: public for name, public in _NAMES.items() if hasattr(torch.ops.c10d, name)
}
_FUNCTIONAL = {
    "all_gather_into_tensor": "all_gather", "reduce_scatter_tensor": "reduce_scatter", "all_reduce": "all_reduce",
    "all_to_all_single": "all_to_all", "broadcast": "broadcast",
}  # fmt: skip
#: Functional collectives, which DTensor and transformers' experts call. Libraries' own ones are added once imported.
COLLECTIVES |= {getattr(torch.ops._c10d_functional, name).default: public for name, public in _FUNCTIONAL.items()}


def call(func: OpOverload, args: tuple[object, ...], span: int) -> Call:
    """The record of one call of a collective's operator."""
    if func.namespace != "c10d":
        return _functional(func, args, span)
    largest = largest_of(args)
    return Call(COLLECTIVES[func], dtype_name(largest[0]) if largest else "", bytes_of(largest), _ranks(args), span)


def _functional(func: OpOverload, args: tuple[object, ...], span: int) -> Call:
    given, group = cast("torch.Tensor", args[0]), args[-1]
    resolved = group if isinstance(group, dist.ProcessGroup) else _resolve_process_group(group)  # type: ignore[arg-type]
    ranks = resolved.size()
    n_bytes = given.nbytes * (ranks if COLLECTIVES[func] == "all_gather" else 1)
    return Call(COLLECTIVES[func], dtype_name(given), n_bytes, ranks, span)


def _ranks(args: tuple[object, ...]) -> int:
    groups = [argument for argument in args if isinstance(argument, torch.ScriptObject)]
    return next((size for size in map(_size, groups) if size), 1)


def _size(argument: torch.ScriptObject) -> int:
    try:
        return dist.ProcessGroup.unbox(argument).size()
    except RuntimeError:  # a reduce operation, not a group
        return 0
