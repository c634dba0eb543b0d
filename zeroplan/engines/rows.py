"""The position of each parameter in DeepSpeed's flat buffer of all parameters, and the part that rank 0 owns.

Rank 0's shard is the first, so it begins with the embedding. Ranks in the middle own as many elements, with other borders.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import accumulate, groupby
from operator import attrgetter
from typing import NamedTuple, TypeAlias, cast

from zeroplan.engines.modules import LEAF_FAMILIES, executed_modules
from zeroplan.memo import Computed
from zeroplan.numeric import Int, added_up, ceil_div, for_each_value, maximum, minimum
from zeroplan.spec.model import ModelSpec
from zeroplan.transformer.parameters import Layout, Parameter, below_blocks, operator_of
from zeroplan.transformer.params import has_frozen, is_frozen, layout, runs_in_order, trained_layout

#: NCCL's alignment of an all-gather's input, in elements (DeepSpeed 0.19.8, ``nccl_start_alignment_factor``).
_ALIGNMENT = 2


#: Parameters that run before the blocks and are registered after the final norm.
REGISTERED_LATE = ("model.embed_tokens_per_layer.", "model.per_layer_")


Sizes: TypeAlias = tuple[tuple[int, int], ...]
"""Elements of a parameter, and the number of parameters of that size."""


class Placed(NamedTuple):
    """A parameter at its position in the flat buffer, and its block: -1 before the first and ``n_blocks`` after the last."""

    parameter: Parameter
    block: int
    start: int
    end: int


class Group(NamedTuple):
    """A parameter group of the optimizer, which DeepSpeed lays flat by itself: its elements of the row."""

    start: int
    end: int
    records: tuple[Placed, ...]
    """The parameters that are larger than every earlier one."""


@dataclass(frozen=True, eq=False, slots=True)
class Row:
    """Parameters one after the other, in the order of ``model.parameters()``. A model has one row of all and one of the trained.

    With several parameter groups, those of a group follow one another.
    """

    model: ModelSpec
    placed: tuple[Placed, ...]
    starts: tuple[int, ...]
    ends: tuple[int, ...]
    executed: tuple[Placed, ...]
    """The same parameters in the order in which their modules run forward."""
    groups: tuple[Group, ...]
    n_elements: int
    n_blocks: int
    trained: tuple[int, ...]
    """Elements of each parameter's gradient; 0 if it is frozen."""

    @property
    def records(self) -> tuple[Placed, ...]:
        """The parameters that are larger than every earlier one of their group."""
        return tuple(each for group in self.groups for each in group.records)


@lru_cache(maxsize=256)
def row(model: ModelSpec) -> Row:
    """Return ``model``'s parameters one after the other.

    >>> from zeroplan.spec.model import ModelSpec
    >>> tiny = ModelSpec(family="llama", hidden_size=8, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
    ...                  num_key_value_heads=1, head_dim=4, vocab_size=10)
    >>> row(tiny).placed[1].start, row(tiny).n_elements
    (80, 1352)
    """
    return row_of(model, layout(model))


@lru_cache(maxsize=256)
def trained_row(model: ModelSpec) -> Row:
    """Return the row of the parameters that get gradients: all of them, or those of the adapters."""
    return row_of(model, trained_layout(model)) if has_frozen(model) else row(model)


@lru_cache(maxsize=256)
def blocks_with_frozen(whole: Row) -> frozenset[int]:
    """Return the blocks with a frozen parameter."""
    return frozenset([each.block for each in whole.placed if each.parameter.frozen])


@lru_cache(maxsize=256)
def row_as_held(model: ModelSpec, element_bytes: int) -> Row:
    """Return the parameters as stage 3 shards them: weights in four bits are columns of numbers in the compute dtype."""
    if not model.is_quantised:
        return row(model)
    from zeroplan.engines.quantised import packed_layout  # noqa: PLC0415  keeps start-up fast

    return row_of(model, packed_layout(model, element_bytes))


def numel(each: Placed) -> int:
    """Return the elements of a parameter."""
    return each.end - each.start


@lru_cache(maxsize=256)
def in_backward(whole: Row) -> dict[int, tuple[Placed, ...]]:
    """Return the parameters of each block in backward order, the last block first."""
    return {block: tuple(some) for block, some in groupby(reversed(whole.executed), key=attrgetter("block"))}


@lru_cache(maxsize=256)
def arrivals_of(whole: Row, *, leaves: bool) -> dict[int, tuple[tuple[Placed, ...], ...]]:
    """Return the gradients of each block in backward order, grouped by those that reach the bucket together.

    ZeRO-3 waits until the backward of a leaf module ends, and then takes its gradients in the order of the parameters
    (DeepSpeed 0.19.8, ``stage3.py``, ``create_reduce_and_remove_grad_hooks``).
    """
    return _grouped(whole, str, leaves=leaves)


@lru_cache(maxsize=256)
def groups_of(whole: Row, *, leaves: bool = False) -> dict[int, tuple[tuple[Placed, ...], ...]]:
    """Return the gradients of each block in backward order, grouped by the operator that makes them.

    A matrix product makes the gradients of its weight and its bias, and a norm those of its two parameters. One gradient waits
    while the other enters the bucket.
    """
    return _grouped(whole, operator_of, leaves=leaves)


def _grouped(whole: Row, key: Callable[[str], str], *, leaves: bool) -> dict[int, tuple[tuple[Placed, ...], ...]]:
    """Group neighbours whose names have the same key, and with ``leaves`` the parameters of a leaf module."""

    def own_key(name: str) -> str:
        return _LEAF if leaves and is_leaf(whole, name) else key(name)

    cuts = Computed[tuple[str, ...], list[tuple[int, int]]](lambda names: _cuts([own_key(name) for name in names]))
    found = dict[int, tuple[tuple[Placed, ...], ...]]()
    for block, some in in_backward(whole).items():  # blocks of one kind have the same names
        names = tuple([each.parameter.name for each in some])
        groups = [some[start:stop] for start, stop in cuts[names]]
        found[block] = tuple([_as_placed(whole, group) for group in groups] if leaves else groups)
    return found


def _as_placed(whole: Row, group: tuple[Placed, ...]) -> tuple[Placed, ...]:
    """Return a leaf module's gradients in the order of the parameters, and others as they are."""
    return tuple(sorted(group, key=attrgetter("start"))) if is_leaf(whole, group[0].parameter.name) else group


def _cuts(keys: list[str]) -> list[tuple[int, int]]:
    """Return where every run of equal keys starts and ends.

    >>> _cuts(["a", "a", "b"])
    [(0, 2), (2, 3)]
    """
    starts = [at for at, key in enumerate(keys) if not at or key != keys[at - 1]]
    return list(zip(starts, [*starts[1:], len(keys)], strict=True))


_LEAF = "leaf module"


_OF_LEAF = ("mlp.experts.", "mlp.gate.", "mlp.shared_expert.", "mlp.shared_expert_gate.")


def is_leaf(whole: Row, name: str) -> bool:
    """Whether a parameter belongs to a module that is gathered as one: the whole MLP of a block with experts."""
    return whole.model.family in LEAF_FAMILIES and name.startswith(_OF_LEAF)


def embedding_elements(whole: Row) -> int:
    """Return the elements of the token embedding's gradient, 0 if it is frozen; for a profile, of the tied or the largest table."""
    if whole.model.profile is not None:
        return max(_of_embeddings(whole), default=0)
    return 0 if is_frozen(whole.model, "embedding") else whole.model.vocab_size * whole.model.hidden_size


def head_elements(whole: Row) -> int:
    """Return the elements of the head's gradient, 0 if it is frozen; for a profile as :func:`embedding_elements`."""
    if whole.model.profile is not None:
        return embedding_elements(whole)
    return 0 if is_frozen(whole.model, "head") else (whole.model.head_rows or whole.model.vocab_size) * whole.model.hidden_size


def embedding_symbol(whole: Row) -> str:
    """Return the text of :func:`embedding_elements` in formulas."""
    return "h·V" if whole.model.profile is None else str(embedding_elements(whole))


def _of_embeddings(whole: Row) -> list[int]:
    tied = layout(whole.model).tied_head
    below = [each for each in whole.placed if each.block < 0]
    return [each.end - each.start for each in below if tied is None or each.parameter.name == tied.name]


def has_tied_head(whole: Row) -> bool:
    """Whether the embedding is also the head, and so gets two gradients."""
    if whole.model.profile is not None:
        return layout(whole.model).tied_head is not None
    return whole.model.tie_word_embeddings and whole.model.adapter is None and not is_frozen(whole.model, "embedding")


def row_of(model: ModelSpec, parts: Layout) -> Row:
    """Return the parameters of a layout of ``model`` one after the other."""
    blocks = [parts.runs[run].parameters for run in runs_in_order(model)]
    groups = ((-1, parts.embeddings), *enumerate(blocks), (len(blocks), parts.tail))
    flat = _as_registered(model, [(block, parameter) for block, parameters in groups for parameter in parameters], len(blocks))
    if model.family == "opt":
        below = below_blocks(parts)
        flat = [(len(blocks) if block < 0 and one not in below else block, one) for block, one in flat]
    placed = _placed(flat)
    trained = tuple([0 if each.parameter.frozen else each.end - each.start for each in placed])
    executed = _executed(model, placed, len(blocks)) if model.profile is None else _order_of_arrival(model, placed)
    starts, ends = tuple([each.start for each in placed]), tuple([each.end for each in placed])
    return Row(model, placed, starts, ends, executed, (_group(placed),), ends[-1], len(blocks), trained)


def in_two_groups(whole: Row, first: Callable[[Parameter], bool]) -> Row:
    """Return the row with two parameter groups: those that ``first`` picks, by falling shape, then the others.

    Neither group may be empty.

    Source: DeepSpeed 0.19.8, ``runtime/zero/muon/original_muon.py``, ``MuonWithAuxAdam.__init__``.
    """
    halves = [[each for each in whole.placed if first(each.parameter) is chosen] for chosen in (True, False)]
    halves[0].sort(key=lambda each: each.parameter.shape, reverse=True)
    placed = _placed([(each.block, each.parameter) for half in halves for each in half])
    named = {(each.block, each.parameter.name): each for each in placed}
    count = len(halves[0])
    return replace(
        whole,
        placed=placed,
        starts=tuple(each.start for each in placed),
        ends=tuple(each.end for each in placed),
        executed=tuple(named[each.block, each.parameter.name] for each in whole.executed),
        groups=(_group(placed[:count]), _group(placed[count:])),
        trained=tuple(map(numel, placed)),
    )


def _placed(flat: list[tuple[int, Parameter]]) -> tuple[Placed, ...]:
    sizes = Computed[tuple[int, ...], int](math.prod)  # blocks of one kind have the same shapes
    ends = list(accumulate([sizes[parameter.shape] for _, parameter in flat]))
    rows = zip([each for _, each in flat], [block for block, _ in flat], (0, *ends[:-1]), ends, strict=True)
    return tuple(map(partial(tuple.__new__, Placed), rows))  # a fifth of the time of Placed(...), which a large model notices


def _group(placed: tuple[Placed, ...]) -> Group:
    return Group(placed[0].start, placed[-1].end, _records(placed))


def _as_registered(model: ModelSpec, flat: list[tuple[int, Parameter]], n_blocks: int) -> list[tuple[int, Parameter]]:
    """Return parameters in the module's order, which layouts of families have, except for the embeddings of each layer."""
    if model.per_layer is not None:
        late = [each for each in flat if each[1].name.startswith(REGISTERED_LATE)]
        rest = [each for each in flat if each not in late]
        at = next((at for at, (_, one) in enumerate(rest) if one.name.startswith("lm_head.")), len(rest))
        return [*rest[:at], *late, *rest[at:]]
    if model.profile is None:
        return flat
    from zeroplan.transformer.profiled import profile_of  # noqa: PLC0415  only a profile pays for it

    place = {name: at for at, name in enumerate(profile_of(model).order)}
    return sorted(flat, key=lambda each: place[each[1].name if each[0] in (-1, n_blocks) else ""])


def _order_of_arrival(model: ModelSpec, placed: tuple[Placed, ...]) -> tuple[Placed, ...]:
    """Return the reverse of the order in which the profile's trace saw gradients reach their weights."""
    from zeroplan.transformer.profiled import profile_of  # noqa: PLC0415  only a profile pays for it

    profile = profile_of(model)
    seen = profile.variants[0].more
    kinds = [run.kind for run in profile.runs for _ in range(run.layers)]
    arrivals = (seen.last_handed, *(seen.blocks[kind].handed for kind in kinds), seen.head_handed)
    named = {(each.block, each.parameter.name): each for each in placed}
    return tuple(named[block, one.name] for block, of_it in enumerate(arrivals, start=-1) for one in reversed(of_it))


def _executed(model: ModelSpec, placed: tuple[Placed, ...], n_blocks: int) -> tuple[Placed, ...]:
    """Return parameters in the order in which their modules run forward, which blocks of one kind share."""
    orders = {True: Computed(partial(_order, model)), False: Computed(partial(_order, None))}
    ordered: list[Placed] = []
    for block, some in groupby(sorted(placed, key=attrgetter("block")), key=attrgetter("block")):
        inside = list(some)
        order = orders[0 <= block < n_blocks][tuple([each.parameter.name for each in inside])]
        ordered += [inside[at] for at in order]
    return tuple(ordered)


def _order(model: ModelSpec | None, names: tuple[str, ...]) -> list[int]:
    """Return the indices of the parameters of a block, or of the part outside the blocks if no model is given."""
    modules = [name.rpartition(".")[0] for name in names]
    owners = tuple(dict.fromkeys(modules))
    every = owners if model is None else executed_modules(model, owners)
    places = sorted(range(len(names)), key=lambda at: at - 1.5 * names[at].endswith(_BIAS_OF_EXPERTS))  # before the weight
    return [at for owner in every for at in places if modules[at] == owner]


#: The biases of GPT-OSS's experts. Each is registered after its weight, but its rows are selected before the grouped product with
#: that weight runs, so its gradient comes later (transformers 5.23, integrations/moe.py, ``grouped_mm_experts_forward``).
_BIAS_OF_EXPERTS = (".experts.gate_up_proj_bias", ".experts.down_proj_bias")


def _records(placed: tuple[Placed, ...]) -> tuple[Placed, ...]:
    records, largest = list[Placed](), 0
    for each in placed:
        if each.end - each.start > largest:
            records.append(each)
            largest = each.end - each.start
    return tuple(records)


def partition_elements(whole: Row, n_ranks: Int) -> Int:
    """Return one rank's share of the row, padded to an equal, aligned size on every rank: the sum over groups. [elements]

    Source: DeepSpeed 0.19.8, ``stage_1_and_2.py``, ``flatten_dense_tensors_aligned`` with 2·N.

    >>> from zeroplan.spec.model import ModelSpec
    >>> tiny = ModelSpec(family="llama", hidden_size=8, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
    ...                  num_key_value_heads=1, head_dim=4, vocab_size=10)
    >>> partition_elements(row(tiny), 5)  # 1352 -> 136 · 10
    272
    """
    return sum(share_elements(group, n_ranks) for group in whole.groups)


def share_elements(group: Group, n_ranks: Int) -> Int:
    """Return one rank's padded share of a parameter group. [elements]"""
    return ceil_div(group.end - group.start, _ALIGNMENT * n_ranks) * _ALIGNMENT


def touched_elements(whole: Row, n_ranks: Int) -> Int:
    """Return the elements of all parameters that begin in rank 0's share, each counted whole. [elements]

    With two parameter groups: the most that any rank's share of each reaches into. Source: DeepSpeed 0.19.8,
    ``stage_1_and_2.py``, ``get_partition_info`` and ``copy_grads_in_partition``.
    """
    if len(whole.groups) > 1:
        return sum(most_touched(whole, at, n_ranks) for at in range(len(whole.groups)))
    return pick(whole.ends, count_below(whole.starts, partition_elements(whole, n_ranks)) - 1)


def most_touched(whole: Row, group: int, n_ranks: Int) -> Int:
    """Return the most elements of a group's parameters that one rank's share reaches into, each counted whole. [elements]"""
    return for_each_value(partial(_most_touched, whole, group), n_ranks)


@lru_cache(maxsize=4096)
def _most_touched(whole: Row, group: int, n_ranks: int) -> int:
    return max(sum(map(numel, each)) for each in of_ranks(whole, group, n_ranks))


def of_ranks(whole: Row, group: int, n_ranks: int) -> Iterator[tuple[Placed, ...]]:
    """Yield the parameters of a group that reach into each rank's share."""
    one = whole.groups[group]
    share = int(share_elements(one, n_ranks))
    for start in range(one.start, one.end, share):
        yield whole.placed[bisect_right(whole.ends, start) : bisect_left(whole.starts, min(start + share, one.end))]


def largest_slice(whole: Row, n_ranks: Int) -> Int:
    """Return the largest piece of one parameter within rank 0's shares. [elements]"""
    return maximum(
        0,
        *(
            minimum(each.parameter.numel, group.start + share_elements(group, n_ranks) - each.start)
            for group in whole.groups
            for each in group.records
        ),
    )


def largest_parameter(whole: Row) -> int:
    """Return the elements of the largest parameter tensor."""
    return max(each.parameter.numel for each in whole.records)


def count_below(ascending: tuple[int, ...], limit: Int) -> Int:
    """Return how many of some ascending values are below ``limit``; a column if ``limit`` is one.

    >>> count_below((0, 10, 20), 11)
    2
    """
    if isinstance(limit, int):
        return bisect_left(ascending, limit)
    import numpy as np  # noqa: PLC0415  a single job never needs it

    return cast("Int", np.searchsorted(np.asarray(ascending, dtype=np.int64), limit, side="left"))


def pick(values: tuple[int, ...], index: Int) -> Int:
    """Return the value at ``index``; a column if ``index`` is one.

    >>> pick((5, 6, 7), 1)
    6
    """
    if isinstance(index, int):
        return values[index]
    import numpy as np  # noqa: PLC0415  a single job never needs it

    return cast("Int", np.asarray(values, dtype=np.int64)[index])


def shares(sizes: Sizes, n_ranks: Int) -> Int:
    """Return one rank's elements if each parameter is split separately: the sum of ``ceil(numel/N)``. [elements]

    >>> shares(((10, 2), (4, 1)), 4)
    7
    """
    return added_up(count * ceil_div(numel, n_ranks) for numel, count in sizes)
