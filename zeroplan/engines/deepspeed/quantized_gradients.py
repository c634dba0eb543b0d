"""ZeRO++'s quantized gradients (qgZ) at stage 3 of DeepSpeed: their memory and traffic.

Two all-to-alls in 4 bits, within a node and then across nodes, replace one reduce-scatter per gradient. Vectors, and gradients
that the ranks do not divide, are reduce-scattered one by one. Source: Wang et al. 2023 (arXiv:2306.10209), section 3.3;
DeepSpeed 0.19.8, ``runtime/comm/coalesced_collectives.py``, ``all_to_all_quant_reduce``.
"""

from collections.abc import Iterator
from functools import lru_cache
from math import prod
from typing import NamedTuple

from zeroplan.engines.collecting import Highest, Memory
from zeroplan.engines.deepspeed.buckets import Flush
from zeroplan.engines.formulas import sized
from zeroplan.engines.rows import Row, row
from zeroplan.errors import SpecError
from zeroplan.ledger import Collective, Kind, Line
from zeroplan.numeric import Bool, Int, ceil_div, for_each_value, maximum, round_up, where
from zeroplan.spec.mesh import Mesh
from zeroplan.spec.model import ModelSpec
from zeroplan.spec.recipe import RecipeSpec

QGZ = "DeepSpeed 0.19.8, runtime/comm/coalesced_collectives.py, all_to_all_quant_reduce"
_HALF, _SCALE = 2, 4
"""Bytes of a dequantized element, and of a group's scale (``csrc/quantization/pt_binding.cpp``)."""
_IN_4_BITS = 2
"""Elements in a byte."""
IN_4_BITS = "gradients in 4 bits, their scales, and what comes of them"
NAMES = (
    "payload", "scales", "received", "received scales", "reduced in 4 bits", "reduced scales", "across", "across scales", "restored"
)  # fmt: skip
"""The variables of :func:`quantized`, whose tensors are freed when DeepSpeed's function returns."""


class Split(NamedTuple):
    """The ranks of a reduction, the ranks per node, and bytes of an element of a gradient and of a kept one."""

    ranks: int
    local: int
    element: int
    kept: int

    @property
    def nodes(self) -> int:
        """Number of groups of ``local`` ranks."""
        return self.ranks // self.local


Shape = tuple[int, ...]


def applies(recipe: RecipeSpec, n_ranks: Int) -> Bool:
    """Whether gradients are quantized: only with more than one node."""
    options = recipe.deepspeed
    return (n_ranks > options.gpus_per_node) if options.zero_quantized_gradients else False


def refuse_quantized_gradients(model: ModelSpec, recipe: RecipeSpec, mesh: Mesh) -> None:
    """Raise SpecError for quantized gradients that DeepSpeed ignores or fails on, or that are not modelled."""
    options, ranks = recipe.deepspeed, mesh.dp_shard
    if not options.zero_quantized_gradients:
        return
    if recipe.zero_stage != 3:
        raise SpecError(f"zero_quantized_gradients needs ZeRO stage 3; leave it out at stage {recipe.zero_stage}")
    if options.offloads:
        raise SpecError("zero_quantized_gradients with offload is not modelled; leave one of them out")
    if not options.reduce_scatter:
        raise SpecError("zero_quantized_gradients needs reduce_scatter; leave one of them out")
    if isinstance(ranks, int) and ranks > options.gpus_per_node and ranks % options.gpus_per_node:
        raise SpecError(f"zero_quantized_gradients needs whole nodes of {options.gpus_per_node} GPUs; {ranks} ranks are none")
    if isinstance(ranks, int) and ranks > options.gpus_per_node:
        _refuse_uneven(row(model), ranks)


def _refuse_uneven(whole: Row, ranks: int) -> None:
    """Raise SpecError if scales do not divide evenly, since the all-to-all then fails (torch 2.13, ``checkSplitSizes``)."""
    for shape in {each.parameter.shape for each in whole.placed}:
        if is_quantized(shape, ranks) and (groups := _groups(shape, ranks)) % ranks:
            raise SpecError(
                f"zero_quantized_gradients: the {groups:,} scales of a gradient of {shape[0]:,} x {shape[1]:,} cannot be shared "
                f"out over {ranks} ranks, and DeepSpeed fails; use another number of ranks, or leave it out"
            )


def is_quantized(shape: Shape, ranks: int) -> bool:
    """Whether a gradient of this shape is sent in 4 bits: a matrix that the ranks divide."""
    return len(shape) > 1 and prod(shape) % (2 * ranks) == 0


def _groups(shape: Shape, ranks: int) -> int:
    """Return the number of groups, each with a scale, in which a gradient is quantized."""
    return max(shape[0], shape[1], ranks)


@lru_cache(maxsize=4096)
def reduction_bytes(shapes: tuple[Shape, ...], split: Split) -> int:
    """Return the peak of reducing these gradients one after the other, without the gradients themselves. [bytes]

    Variables hold one gradient's tensors until the next gradient's exist.
    """
    memory = Highest()
    for shape in shapes:
        if is_quantized(shape, split.ranks):
            quantized(memory, shape, split)
        elif (numel := prod(shape)) % split.ranks:
            memory.request("reduced", split.element * round_up(numel, split.ranks), Kind.REDUCE, IN_4_BITS)
    memory.release(*NAMES)
    if split.kept != split.element:
        wide = split.kept * sum(ceil_div(prod(shape), split.ranks) for shape in shapes)
        memory.request("cast", wide, Kind.REDUCE, IN_4_BITS)
    return memory.most


def quantized(memory: Memory, shape: Shape, split: Split) -> None:
    """Quantize a gradient, send it within the node and across nodes, and sum the received parts, which stay."""
    numel, groups = prod(shape), _groups(shape, split.ranks)
    payload, scales = numel // _IN_4_BITS, _SCALE * groups
    for made in (
        {"payload": payload, "scales": scales}, {"received": payload}, {"received scales": scales},
        {"reduced in 4 bits": payload // split.local, "reduced scales": scales // split.local},
        {"across": payload // split.local}, {"across scales": scales // split.local},
        {"restored": _HALF * numel // split.local},
    ):  # fmt: skip
        _assign(memory, made)
    share = _HALF * numel // split.ranks
    memory.request("sum", share, Kind.REDUCE, IN_4_BITS)
    memory.request("previous sum", share, Kind.REDUCE, IN_4_BITS)
    memory.release("previous sum")
    memory.request("reduced", share, Kind.REDUCE, IN_4_BITS)  # the mean over nodes
    memory.release("sum")


def _assign(memory: Memory, made: dict[str, int]) -> None:
    """Assign new tensors to variables, which frees the variables' old tensors."""
    for name, n_bytes in made.items():
        memory.request(f"new {name}", n_bytes, Kind.REDUCE, IN_4_BITS)
    for name in made:
        memory.release(name)
        memory.rename(f"new {name}", name)


def quantized_line(recipe: RecipeSpec, flush: Flush, n_ranks: Int, *, element: int, kept: int) -> Line:
    """Return the peak of reducing a bucket with quantized gradients. [bytes]"""
    shapes = tuple(each.parameter.shape for each in sorted(flush.inside, key=lambda each: each.start))
    local = recipe.deepspeed.gpus_per_node

    def of(ranks: int) -> int:
        return reduction_bytes(shapes, Split(ranks, local, element, kept)) if ranks > local else 0

    n_bytes = for_each_value(of, n_ranks)
    return sized(Kind.REDUCE, 1, n_bytes, f"{IN_4_BITS} (qgZ)", QGZ)


def sent_bytes(shape: Shape, split: Split) -> tuple[int, int]:
    """Return the bytes of a gradient and its scales in the all-to-all within a node, and in the one across nodes. [bytes]"""
    payload, scales = prod(shape) // _IN_4_BITS, _SCALE * _groups(shape, split.ranks)
    return payload + scales, payload // split.local + scales // split.local


class _Sent(NamedTuple):
    """The traffic of one pass: bytes within a node and across nodes, number of calls, and elements reduced unquantized."""

    within: int
    across: int
    calls: int
    elements: int
    plain: int
    plain_calls: int


@lru_cache(maxsize=4096)
def _sent(whole: Row, ranks: int, local: int) -> _Sent:
    within = across = calls = elements = plain = plain_calls = 0
    for each in whole.placed if ranks > local else ():
        shape, numel = each.parameter.shape, each.end - each.start
        if not is_quantized(shape, ranks):
            plain, plain_calls = plain + round_up(numel, ranks), plain_calls + 1
            continue
        near, far = sent_bytes(shape, Split(ranks, local, 0, 0))
        within, across = within + near, across + far
        calls, elements = calls + 2, elements + numel
    return _Sent(within, across, calls, elements, plain, plain_calls)


def quantized_collectives(
    recipe: RecipeSpec, whole: Row, plain: Collective, micro: Int, *, element: int
) -> Iterator[Collective]:  # fmt: skip
    """Yield the collectives that replace ``plain``: all-to-alls within and across nodes, and unquantized reductions."""
    if not recipe.deepspeed.zero_quantized_gradients or (quantized := applies(recipe, plain.group)) is False:
        yield plain
        return
    n, local = plain.group, recipe.deepspeed.gpus_per_node
    within, across, calls, elements, left, left_calls = (
        for_each_value(lambda ranks, at=at: _sent(whole, ranks, local)[at], n)  # type: ignore[misc]  # bound at once
        for at in range(len(_Sent._fields))
    )
    nodes = maximum(n // local, 1)
    for place, near, group, payload, moved in (
        ("within a node", True, local, within, elements),
        ("across nodes", False, nodes, across, elements // local),
    ):
        yield Collective(
            "all_to_all", f"gradients in 4 bits and their scales, {place}", plain.when, group, calls * micro,
            ceil_div(payload, maximum(calls, 1)), (group - 1) * payload // group * micro, moved * micro, QGZ, payload * micro, near,
            plain.phase,
        )  # fmt: skip
    yield plain._replace(
        what="gradients that are not quantized",
        calls=where(quantized, left_calls * micro, plain.calls),
        n_bytes=where(quantized, element * ceil_div(left, maximum(left_calls, 1)), plain.n_bytes),
        sent_bytes=where(quantized, (n - 1) * element * left // n * micro, plain.sent_bytes),
        volume_elements=where(quantized, left * micro, plain.volume_elements),
        of_all=where(quantized, element * left * micro, plain.payload_bytes),
    )


def unless_quantized(recipe: RecipeSpec, n_ranks: Int, n_bytes: Int) -> Int:
    """Return the memory of a bucket that is reduced unquantized; 0 with quantization. [bytes]"""
    return where(applies(recipe, n_ranks), 0, n_bytes)
