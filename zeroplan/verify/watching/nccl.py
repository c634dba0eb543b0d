"""NCCL's process group as torch makes it, and its collectives as torch's flight recorder logged them.

The recorder notes sizes, dtypes and, on request, the duration of every call. It holds no tensor.
Source: ``torch/csrc/distributed/c10d/FlightRecorderDetail.hpp`` (``dump_json``, ``getPgConfigJson``), torch 2.11 and 2.13.
"""

import json
import os
from collections.abc import Iterator, Mapping
from datetime import timedelta
from itertools import chain
from math import prod

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from zeroplan.verify.watching.log import Call, Log

_ENTRIES = 100_000
_RECORDER_SETTINGS = {
    "TORCH_FR_BUFFER_SIZE": str(_ENTRIES), "TORCH_NCCL_TRACE_BUFFER_SIZE": str(_ENTRIES), "TORCH_NCCL_ENABLE_TIMING": "1",
}  # fmt: skip
_DTYPES = {
    "Float": ("float32", 4), "BFloat16": ("bfloat16", 2), "Half": ("float16", 2), "Double": ("float64", 8), "Long": ("int64", 8),
    "Int": ("int32", 4), "Short": ("int16", 2), "Byte": ("uint8", 1), "Char": ("int8", 1), "Bool": ("bool", 1),
}  # fmt: skip
#: Names of calls in torch's NCCL group, and the names in ledgers.
_OPERATIONS = {
    "_all_gather_base": "all_gather", "all_gather_into_tensor_coalesced": "all_gather", "_reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter", "all_to_all_base": "all_to_all", "all_reduce_barrier": "barrier",
    "allreduce_coalesced": "all_reduce", "_broadcast_oop": "broadcast", "_reduce_oop": "reduce",
    # The recorder may adopt the newer method names of torch (zeroplan.verify.watching.group).
    "all_gather_single": "all_gather", "all_gather_single_coalesced": "all_gather", "reduce_scatter_single": "reduce_scatter",
    "reduce_scatter_single_coalesced": "reduce_scatter", "all_to_all_single": "all_to_all",
}  # fmt: skip


def join(store: Store, *, rank: int, ranks: int, timeout_s: float) -> None:
    """Make this process a rank of an NCCL group on its current GPU, with its calls and their durations recorded."""
    for name, value in _RECORDER_SETTINGS.items():
        os.environ.setdefault(name, value)
    dist.init_process_group(
        "nccl", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=timeout_s),
        device_id=torch.device("cuda", torch.cuda.current_device()),
    )  # fmt: skip


def flight_recorder_dump() -> Mapping[str, object]:
    """The contents of the flight recorder, in its own format."""
    from torch._C._distributed_c10d import _dump_nccl_trace_json  # type: ignore[attr-defined]  # noqa: PLC0415  CUDA's builds have it

    dump: Mapping[str, object] = json.loads(_dump_nccl_trace_json(includeCollectives=True, onlyActive=False))
    return dump


def calls_of(dump: Mapping[str, object], log: Log) -> list[Call]:
    """The collectives in a dump of the flight recorder, in order, each with its phase."""
    return list(_calls(dump, log))


def _calls(dump: Mapping[str, object], log: Log) -> Iterator[Call]:
    groups: dict[str, dict[str, str]] = dump.get("pg_config", {})  # type: ignore[assignment]
    entries: list[dict[str, object]] = dump.get("entries", [])  # type: ignore[assignment]
    for entry in entries:
        sizes = (_bytes(entry, "input"), _bytes(entry, "output"))
        name = str(entry.get("profiling_name", "")).removeprefix("nccl:")
        if name == "coalesced":
            continue  # this entry brackets calls that have entries of their own
        time_ns, took = entry.get("time_created_ns"), entry.get("duration_ms")
        yield Call(
            operation=_OPERATIONS.get(name, name),
            dtype=_dtype(entry),
            group=_group_size(groups.get(_group_name(entry), {})),
            n_bytes=max(sizes),
            phase=log.phase_at(int(str(time_ns))),
            seconds=float(str(took)) / 1000 if took is not None else None,
        )


def _bytes(entry: Mapping[str, object], side: str) -> int:
    shapes: list[list[int]] = entry.get(f"{side}_sizes", [])  # type: ignore[assignment]
    dtypes: list[str] = entry.get(f"{side}_dtypes", [])  # type: ignore[assignment]
    return sum(prod(shape) * _DTYPES.get(dtype, ("", 0))[1] for shape, dtype in zip(shapes, dtypes, strict=False))


def _dtype(entry: Mapping[str, object]) -> str:
    both: list[list[str]] = [entry.get("input_dtypes", []), entry.get("output_dtypes", [])]  # type: ignore[list-item]
    first = next(chain(*both), "")
    return _DTYPES.get(first, (first.lower(), 0))[0]


def _group_name(entry: Mapping[str, object]) -> str:
    """The group's name in the recorder's group list; an entry has a list of name and description, and a number."""
    both = entry.get("pg_name")
    return str(both[0]) if isinstance(both, list) and both else str(entry.get("pg_id"))


def _group_size(group: Mapping[str, str]) -> int:
    """The number of ranks of a group; the recorder writes the ranks as text, ``[0, 1]``."""
    return len(json.loads(str(group.get("ranks") or "[]"))) or dist.get_world_size()
