"""Sets the integers that collectives return: it assumes that every other rank sends the same values as this rank.

Numbers that follow from an assumed choice, such as tokens per expert, are multiplied by the imbalance: routers choose this
rank's experts that many times as often as an even choice.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from typing import cast

import torch
import torch.distributed as dist
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed import distributed_c10d as c10d

from zeroplan.verify.fake_cuda.known_values import Sure, forget, how_sure, keep, known

Tensors = Sequence[torch.Tensor]
Pairs = Iterator[tuple[torch.Tensor, "torch.Tensor | None", "torch.Tensor | None"]]
"""Tensors that a collective fills, their new values (None if unknown), and the tensors from which those are computed."""
NAMESPACES = ("c10d", "_c10d_functional")


def exchange(func: OpOverload, args: Sequence[object], result: object, imbalance: float) -> bool:
    """Set the values of a collective's results; return whether they follow from an assumed choice."""
    found = _FILLED.get(func._opname)
    assumed = False
    for out, values, source in found(args, result) if found is not None else ():
        sure = Sure.EXACT if source is None else how_sure(source)
        if sure is Sure.ASSUMED and values is not None:
            _fill(out, (values * imbalance).round().to(values.dtype), Sure.EXCHANGED)
            assumed = True
        else:
            _fill(out, values, sure)
    return assumed


def _fill(out: torch.Tensor, values: torch.Tensor | None, sure: Sure) -> None:
    if not isinstance(out, FakeTensor):
        return
    before = known(out)
    if values is None and before is not None:
        forget(out)
    if values is None:
        return
    if before is not None:  # other tensors share this memory
        keep(out, before.copy_(values.reshape(before.shape)), sure)
        return
    keep(out, values.reshape(out.shape).to(out.dtype), sure)


def _group(args: Sequence[object]) -> tuple[int, int]:
    """This rank within a collective's group, and the group's size."""
    for one in args:
        if isinstance(one, torch.ScriptObject) and "ProcessGroup" in str(one._type()):
            group = dist.ProcessGroup.unbox(one)
            return group.rank(), group.size()
    name = args[-1]
    resolve: Callable[[str], dist.ProcessGroup] = c10d._resolve_process_group  # type: ignore[attr-defined, assignment]
    group = resolve(name) if isinstance(name, str) else cast("dist.ProcessGroup", name)
    return group.rank(), group.size()


def _repeated(tensor: torch.Tensor, ranks: int) -> torch.Tensor | None:
    values = known(tensor)
    return None if values is None else torch.cat([values.reshape(-1, *values.shape[1:])] * ranks)


def _gathered(args: Sequence[object], result: object) -> Pairs:
    _, ranks = _group(args)
    outs, ins = (args[0], args[1]) if _in_place(result, args) else (result, args[0])
    for out, one in zip(_listed(outs), _listed(ins), strict=False):
        yield out, _repeated(one, ranks), one


def _gathered_apart(args: Sequence[object], _: object) -> Pairs:
    for outs, one in zip(cast("Sequence[Tensors]", args[0]), cast("Tensors", args[1]), strict=False):
        for out in outs:
            yield out, known(one), one


def _to_all(args: Sequence[object], result: object) -> Pairs:
    """Every rank's piece equals the one that this rank sends to itself."""
    out, one = (args[0], args[1]) if _in_place(result, args) else (result, args[0])
    rank, ranks = _group(args)
    values = known(cast("torch.Tensor", one))
    sizes = cast("Sequence[int]", args[4] if len(args) > 4 else args[2])
    every = None
    if values is not None and values.dim():
        pieces: Tensors = torch.split_with_sizes(values, list(sizes)) if sizes else values.chunk(ranks)
        mine = pieces[rank]
        every = torch.cat([mine] * ranks)
    fits = every is not None and every.numel() == cast("torch.Tensor", out).numel()
    yield cast("torch.Tensor", out), every if fits else None, cast("torch.Tensor", one)


def _to_all_apart(args: Sequence[object], _: object) -> Pairs:
    rank, _ranks = _group(args)
    one = cast("Tensors", args[1])[rank]
    for out in cast("Tensors", args[0]):
        values = known(one)
        yield out, values if values is not None and values.numel() == out.numel() else None, one


def _reduced(args: Sequence[object], result: object) -> Pairs:
    """A sum is this rank's integers times the number of ranks; other reductions keep this rank's values."""
    _, ranks = _group(args)
    in_place = _in_place(result, args)
    sums = _SUMS[-1] if in_place else args[1] == "sum"
    for out, one in zip(_listed(args[0] if in_place else result), _listed(args[0]), strict=False):
        values = known(one)
        if values is None:
            continue
        if sums and values.dtype is not torch.bool:
            values = values * ranks
        yield out, values, one


_SUMS = [False]
"""Whether the running all-reduce is a sum, which its operator does not show to Python."""


def noting_sums(all_reduce: Callable[..., object]) -> Callable[..., object]:
    """Wrap ``torch.distributed.all_reduce`` to note whether it sums."""

    @wraps(all_reduce)
    def known_to_sum(tensor: object, op: object = dist.ReduceOp.SUM, *args: object, **kwargs: object) -> object:
        _SUMS.append(op == dist.ReduceOp.SUM)
        try:
            return all_reduce(tensor, op, *args, **kwargs)
        finally:
            _SUMS.pop()

    return known_to_sum


def _received(args: Sequence[object], result: object) -> Pairs:
    """The values another rank sends are unknown."""
    for out in _listed(args[0] if isinstance(args[0], list | tuple) else result):
        yield out, None, None


def _in_place(result: object, args: Sequence[object]) -> bool:
    """Whether an operator fills its first argument, as those of c10d do."""
    return any(isinstance(one, torch.ScriptObject) for one in args) or result is args[0]


def _listed(tensors: object) -> Tensors:
    return [tensors] if isinstance(tensors, torch.Tensor) else cast("Tensors", tensors)


_FILLED: dict[str, Callable[[Sequence[object], object], Pairs]] = {
    "_allgather_base_": _gathered, "allgather_into_tensor_coalesced_": _gathered, "all_gather_into_tensor": _gathered,
    "all_gather_into_tensor_coalesced": _gathered, "all_gather_into_tensor_out": _gathered, "allgather_": _gathered_apart,
    "gather_": _gathered_apart, "alltoall_base_": _to_all, "all_to_all_single": _to_all, "alltoall_": _to_all_apart,
    "allreduce_": _reduced, "allreduce_coalesced_": _reduced, "all_reduce": _reduced, "all_reduce_": _reduced,
    "all_reduce_coalesced": _reduced, "reduce_": _reduced, "recv_": _received, "recv_any_source_": _received, "irecv": _received,
    "scatter_": _received, "reduce_scatter_": _received, "_reduce_scatter_base_": _received,
}  # fmt: skip
