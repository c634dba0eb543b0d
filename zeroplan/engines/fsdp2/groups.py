"""The groups of ``fully_shard``: which parameters each has, and each rank's chunks of them."""

import math
from collections.abc import Iterable
from functools import lru_cache, partial
from itertools import zip_longest
from typing import NamedTuple

from zeroplan.engines.formulas import product, sized
from zeroplan.engines.optimizers import LocalTensor
from zeroplan.engines.precisions import Widths
from zeroplan.ledger import Kind, Line
from zeroplan.numeric import Bool, Int, added_up, ceil_div, where
from zeroplan.spec.model import ModelSpec
from zeroplan.transformer.parameters import BlockRun, Layout, Parameter
from zeroplan.transformer.params import has_frozen, layout
from zeroplan.transformer.params_adapted import only_trained
from zeroplan.transformer.params_split import split_layout
from zeroplan.transformer.recomputed import in_two

SHARD = "torch 2.13, torch/distributed/fsdp/_fully_shard/_fsdp_param.py, FSDPParam._init_sharded_param"
OFFLOAD = "torch 2.13, torch/distributed/fsdp/_fully_shard/_fsdp_api.py, CPUOffloadPolicy"


class Group(NamedTuple):
    """One ``fully_shard`` unit, or its experts alone. [elements]"""

    shard: Int
    """This rank's chunks, each parameter's dim 0 padded to a multiple of the ranks."""
    padded: Int
    """All ranks' chunks together: the size of an all-gather or reduce-scatter buffer."""
    numel: int
    """Elements without padding, the size of autograd's gradients."""
    symbol: str
    alone: int = 0
    """Extra elements while a single rank, which gathers nothing, casts its parameters one after the other."""
    alone_from_host: int = 0
    """The same if each is first copied from the host in fp32, twice as wide."""
    alone_beside_adapters: int = 0
    """The same if frozen parameters are copied from the host uncast."""
    experts: "Group | None" = None
    """With expert parallelism, this rank's experts of a block, which fewer ranks shard; the other fields count them too."""
    in_float8: Int = 0
    """Elements of ``padded`` that ranks gather in float8, with one byte instead of two."""
    casting: Int = 0
    """The most that casts of this rank's chunks to float8 take before the all-gather, one after the other. [bytes]"""
    casting_late: Int = 0
    """The same of a single rank, which casts its parameters only when it copies them out. [bytes]"""
    ranks: Int = 0
    """Of experts: the ranks that have the same ones."""
    narrow: Int = 0
    """Of experts: 1 if they are sharded along dim 1, else 0."""
    by_the_way: int = 0
    """Of experts: extra elements while they are cast one after the other, if nothing is gathered."""
    last: int = 0
    """Of experts: elements of the last parameter."""

    @property
    def whole(self) -> str:
        """The symbol of ``padded`` in formulas."""
        return f"P_{self.symbol}" if self.experts is None else f"(D_{self.symbol} + X_{self.symbol})"

    @property
    def of_experts(self) -> "Group":
        """Its experts, as a group."""
        return self if self.experts is None else self.experts

    @property
    def gathers(self) -> Int:
        """Of experts: 1 if another rank has the same ones, else 0."""
        return where(self.ranks > 1, 1, 0)

    @property
    def beside_experts(self) -> "Group":
        """Its parameters without the experts, as a group."""
        one = self.experts
        if one is None:
            return self
        return Group(self.shard - one.shard, self.padded - one.padded, self.numel - one.numel, self.symbol)


class Ends(NamedTuple):
    """The embedding, and the final norm with the head, as units of their own, and their trained parts."""

    embedding: Group
    head: Group
    trained_embedding: Group
    trained_head: Group


class Cut(NamedTuple):
    """A rank's parameters, and the groups that contain them."""

    tree: Layout
    learning: Layout
    """The trained parameters."""
    beside: tuple[Line, ...]
    """Lines of quantised weights' scales and tables."""
    root: Group
    blocks: tuple[Group, ...]
    trained_root: Group
    trained_blocks: tuple[Group, ...]
    """The trained parts of the groups: all of them, unless weights are frozen."""
    ends: Ends | None
    """Embedding and head as units of their own."""

    @property
    def is_partly_frozen(self) -> bool:
        """Whether some parameters get no gradients."""
        return self.learning is not self.tree


def cut_of(
    model: ModelSpec, width: Widths, n: Int, *, part: Layout | None, first: int | None, tp: int, ep: int, ends_apart: bool
) -> Cut:  # fmt: skip
    """Put the parameters of a model, or of a ``part`` of it, into groups and cut these into ``n`` ranks' chunks.

    ``ends_apart`` makes units of the embedding, and of the final norm with the head. A head that is the embedding too stays with
    the embedding in the root group.
    """
    tree, beside = (part, ()) if part is not None else _parameters(model, width, tp=tp, ep=ep)
    learning = only_trained(tree) if has_frozen(model) else tree
    if first is not None:
        trained = None if learning is tree else in_two(learning, model, first)
        tree = in_two(tree, model, first)
        learning = trained or tree
    is_apart = ends_apart and tree.tied_head is None
    root, blocks = _root(tree, n, "root", is_empty=is_apart), _block_groups(tree, tree, n, tp, ep)
    trained_root, trained_blocks = root, blocks
    if learning is not tree:
        trained_root = _root(learning, n, "trained_root", is_empty=is_apart)
        trained_blocks = _block_groups(tree, learning, n, tp, ep, "trained_")
    ends = _ends(tree, learning, n) if is_apart else None
    return Cut(tree, learning, beside, root, blocks, trained_root, trained_blocks, ends)


def _root(tree: Layout, n: Int, symbol: str, *, is_empty: bool) -> Group:
    return group_of(() if is_empty else (*tree.embeddings, *tree.tail), n, symbol)


def _ends(tree: Layout, learning: Layout, n: Int) -> Ends:
    embedding, head = group_of(tree.embeddings, n, "embedding"), group_of(tree.tail, n, "head")
    if learning is tree:
        return Ends(embedding, head, embedding, head)
    trained = group_of(learning.embeddings, n, "trained_embedding"), group_of(learning.tail, n, "trained_head")
    return Ends(embedding, head, *trained)


def _parameters(model: ModelSpec, width: Widths, *, tp: int, ep: int) -> tuple[Layout, tuple[Line, ...]]:
    """Return a rank's parameters as they are split, packed or distributed; and the scales and tables of packed ones."""
    if model.is_quantised:
        from zeroplan.engines.quantised import packed_layout, scales_of  # noqa: PLC0415  keeps start-up fast

        return packed_layout(model, width.compute), scales_of(model)
    return layout_of_a_rank(model, tp=tp, ep=ep), ()


def layout_of_a_rank(model: ModelSpec, *, tp: int, ep: int) -> Layout:
    """Return the parameters of one of ``tp`` ranks that split matrices and of ``ep`` ranks that split experts."""
    whole = layout(model) if tp == 1 else split_layout(model, tp)
    return whole if ep == 1 else _with_some_experts(whole, ep)


@lru_cache(maxsize=256)
def _with_some_experts(whole: Layout, ep: int) -> Layout:
    """Return the parameters of one rank's experts and of everything else."""

    def local(one: Parameter) -> Parameter:
        return one._replace(shape=(one.shape[0] // ep, *one.shape[1:])) if _is_expert(one) else one

    return whole._replace(runs=tuple(run._replace(parameters=tuple(map(local, run.parameters))) for run in whole.runs))


def _is_expert(parameter: Parameter) -> bool:
    return parameter.active_share != (1, 1)


def _block_groups(tree: Layout, of: Layout, n: Int, tp: int, ep: int, prefix: str = "") -> tuple[Group, ...]:
    """Return the part of each block's unit that is in ``of``. It has a group of experts if the unit has one, even if empty."""
    both = zip(tree.runs, of.runs, strict=True)
    return tuple(_block_group(run, one.parameters, n, tp, ep, f"{prefix}{run.name}") for run, one in both)


def _block_group(run: BlockRun, parameters: tuple[Parameter, ...], n: Int, tp: int, ep: int, symbol: str) -> Group:
    """Return the ``fully_shard`` unit of a block with these of its parameters: all, or the trained ones."""
    if ep == 1:
        return group_of(parameters, n, symbol)
    every = tuple(one for one in run.parameters if _is_expert(one))
    theirs = tuple(one for one in parameters if _is_expert(one))
    shard, numel = _of_a_rank(parameters, n, tp, ep), sum(one.numel for one in parameters)
    if not every:
        return Group(shard, shard * n, numel, symbol)
    apart, ranks = _of_a_rank(theirs, n, tp, ep), n * tp // ep
    narrow, sizes = where(_is_narrow(every[0].shape[0], n * tp, ep), 1, 0), tuple(one.numel for one in theirs)
    experts = Group(
        apart, apart * ranks, sum(sizes), symbol, ranks=ranks, narrow=narrow, by_the_way=cast_one_by_one(sizes),
        last=sizes[-1] if sizes else 0,
    )  # fmt: skip
    return Group(shard, (shard - apart) * n + experts.padded, numel, symbol, experts=experts)


def _is_narrow(rows: int, n: Int, ep: int) -> Bool:
    """Whether there are fewer experts than ``n`` ranks; ``rows`` are this rank's experts."""
    return n > rows * ep


def _of_a_rank(parameters: tuple[Parameter, ...], n: Int, tp: int, ep: int) -> Int:
    """Return this rank's chunks of parameters. [elements]"""
    return added_up(chunk(one, 1, n=n, tp=tp, ep=ep, in_block=True).numel for one in parameters)


def group_of(parameters: tuple[Parameter, ...], n: Int, symbol: str) -> Group:
    """Return one unit of these parameters, split into ``n`` ranks' chunks."""
    shard = added_up([ceil_div(rows, n) * width for rows, width in _widths_by_rows(parameters)])
    sizes = tuple([math.prod(parameter.shape) for parameter in parameters])
    twice = (2,) * len(sizes)
    adapted = tuple([0 if parameter.frozen else 2 for parameter in parameters])
    alone = cast_one_by_one(sizes), cast_one_by_one(sizes, fetched=twice), cast_one_by_one(sizes, fetched=adapted)
    return Group(shard, shard * n, sum(sizes), symbol, *alone)


@lru_cache(maxsize=256)
def cast_one_by_one(sizes: tuple[int, ...], *, fetched: tuple[int, ...] = ()) -> int:
    """Return the most elements of casts beside all unsharded weights: each cast is freed when the next one exists.

    A parameter ``fetched`` from the host, so many times as wide, is freed after its cast.

    >>> cast_one_by_one((20, 10)), cast_one_by_one((20, 2, 10, 1))
    (20, 10)
    """
    most = done = before = 0
    for size, first in zip_longest(sizes, fetched, fillvalue=0):
        most, done = max(most, done + before + (1 + first) * size, done + 2 * size), done + size
        before = size
    return most - done


@lru_cache(maxsize=256)
def _widths_by_rows(parameters: tuple[Parameter, ...]) -> tuple[tuple[int, int], ...]:
    """Return the row counts of parameters, along which they are split, and the total width of all with that many rows."""
    widths: dict[int, int] = {}
    for parameter in parameters:
        rows = parameter.shape[0]
        widths[rows] = widths.get(rows, 0) + parameter.numel // rows
    return tuple(widths.items())


def local_tensors(tree: Layout, n: Int, tp: int, ep: int) -> tuple[LocalTensor, ...]:
    """Return this rank's chunks of the parameters of a layout, in its order."""
    of_rank = partial(chunk, n=n, tp=tp, ep=ep)
    return (
        *[of_rank(parameter, 1, in_block=False) for parameter in tree.embeddings],
        *[of_rank(parameter, run.layers, in_block=True) for run in tree.runs for parameter in run.parameters],
        *[of_rank(parameter, 1, in_block=False) for parameter in tree.tail],
    )


def chunk(parameter: Parameter, repeat: int, *, n: Int, tp: int, ep: int, in_block: bool) -> LocalTensor:
    """Return this rank's chunk: along dim 1 for experts if all ranks outnumber the experts, else along dim 0.

    All ``n·tp`` ranks have experts, since tensor-parallel ranks do not split them.
    """
    rows, *rest = parameter.shape
    if ep == 1 or not _is_expert(parameter):
        return LocalTensor((-(-rows // n), *rest), repeat, in_block, ranks=n, rows=rows)
    narrow, ranks = _is_narrow(rows, n * tp, ep), n * tp // ep
    split = where(narrow, rest[0] // ranks, rest[0])
    return LocalTensor((where(narrow, rows, ceil_div(rows, ranks)), split, *rest[1:]), repeat, in_block)


def parameter_lines(cut: Cut, width: Widths, *, frozen: int) -> tuple[tuple[Line, ...], str]:
    """Return this rank's chunks, and the symbol of the trained ones; ``frozen``: bytes per frozen element. [bytes]"""
    every, trained = _shards(cut, trained=False), _shards(cut, trained=True)
    if not cut.is_partly_frozen:
        return (_parameter_line(every, width.stored, "every parameter", "P/N"),), "P/N"
    symbol = "P_trained/N"
    learning = _parameter_line(trained, width.stored, "every trained parameter", symbol)
    return (_parameter_line(every - trained, frozen, "every frozen parameter", "(P - P_trained)/N"), learning), symbol


def _shards(cut: Cut, *, trained: bool) -> Int:
    outside, blocks = [cut.trained_root if trained else cut.root], cut.trained_blocks if trained else cut.blocks
    if cut.ends is not None:
        outside += cut.ends[2:] if trained else cut.ends[:2]
    return shards_of(outside, blocks, [run.layers for run in cut.tree.runs])


def shards_of(outside: Iterable[Group], blocks: Iterable[Group], layers: Iterable[int]) -> Int:
    """This rank's chunks of units outside the blocks, and of this many layers of each run. [elements]"""
    elements: Int = 0
    for group in outside:
        elements = elements + group.shard
    for group, count in zip(blocks, layers, strict=True):
        elements = elements + count * group.shard
    return elements


def _parameter_line(elements: Int, width: int, which: str, symbol: str) -> Line:
    return sized(Kind.PARAMETERS, width, elements, f"this rank's chunk of {which}", SHARD, symbol)


def on_host(line: Line) -> Line:
    """Return the GPU's line for a tensor in host memory: 0 bytes."""
    return Line(line.kind, 0, f"{line.reason}, in host memory", "0", OFFLOAD)


class ParamGroup(NamedTuple):
    """One parameter group: the parameters of a unit, or a block's experts, or all of a block beside them."""

    of: Group
    whole: str
    """The symbol of its ``padded`` in formulas."""
    share: str
    """The symbol of its ``shard`` in formulas."""
    plain: str
    """The symbol of its ``numel`` in formulas."""
    gathers: Int
    """1 if another rank has a chunk, else 0."""
    gate: str
    """The last factor of formulas for ``gathers``."""
    words: str
    """The owner of the parameters, in a line's words."""
    ranks: Int
    """The ranks that share it."""
    are_experts: bool = False
    in_numbers: bool = False
    """Formulas are bytes only, since stages of a pipeline have several sizes and no symbols."""

    def said(self, n_bytes: Int, formula: str) -> str:
        """Return the formula of this many bytes."""
        return product(1, n_bytes) if self.in_numbers else formula


def param_groups(unit: Group, gathers: Int, words: str, ranks: Int, *, in_numbers: bool = False) -> tuple[ParamGroup, ...]:
    """Return a unit's parameter groups, in the order in which the forward gathers them."""
    symbol, experts = unit.symbol, unit.experts
    if experts is None:
        names = f"P_{symbol}", f"P_{symbol}/N", f"G_{symbol}"
        return (ParamGroup(unit, *names, gathers, "·min(1, N-1)", words, ranks, in_numbers=in_numbers),)
    names = f"D_{symbol}", f"D_{symbol}/N", f"(G_{symbol} - Y_{symbol})"
    beside = ParamGroup(
        unit.beside_experts, *names, 1, "", "this block's beside its experts", ranks, in_numbers=in_numbers
    )  # fmt: skip
    is_whole = isinstance(experts.padded, int) and not experts.padded  # not sharded, so not padded
    names = f"X_{symbol}", f"Y_{symbol}" if is_whole else f"X_{symbol}/F", f"Y_{symbol}"
    words, ranks = "this block's experts", experts.ranks
    return beside, ParamGroup(
        experts, *names, experts.gathers, "·min(1, F-1)", words, ranks, are_experts=True, in_numbers=in_numbers
    )  # fmt: skip
