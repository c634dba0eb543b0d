"""Layouts in which only the first blocks are recomputed, or run in float8: each run of blocks is cut in two."""

from functools import lru_cache

from zeroplan.spec.model import ModelSpec
from zeroplan.spec.recipe import RecipeSpec
from zeroplan.transformer.parameters import BlockRun, Layout
from zeroplan.transformer.params import layout, runs_in_order


def first_recomputed(model: ModelSpec, recipe: RecipeSpec) -> int | None:
    """Return how many blocks, from the first, a recipe recomputes or runs in float8; None if it treats all blocks alike.

    >>> tiny = ModelSpec(family="llama", hidden_size=8, intermediate_size=16, num_hidden_layers=4, num_attention_heads=2,
    ...                  num_key_value_heads=1, head_dim=4, vocab_size=10)
    >>> [first_recomputed(tiny, RecipeSpec(recompute="full", recompute_layers=layers)) for layers in (None, 3, 4)]
    [None, 3, None]
    """
    layers = recipe.recompute_layers or recipe.fsdp2.float8_layers
    return None if layers is None or layers >= model.num_hidden_layers else layers


def layout_by_recomputation(model: ModelSpec, first: int | None) -> Layout:
    """Return a model's layout with the blocks after the first ``first`` in separate runs without recomputation."""
    return layout(model) if first is None else _in_two(model, first)


@lru_cache(maxsize=256)
def _in_two(model: ModelSpec, first: int) -> Layout:
    return in_two(layout(model), model, first)


def in_two(tree: Layout, model: ModelSpec, first: int) -> Layout:
    """Return ``tree``, whole or one rank's share, with the blocks after the first ``first`` in separate runs."""
    order = runs_in_order(model)
    runs = [
        BlockRun(run.kind, layers, run.parameters, plain)
        for plain, part in ((False, order[:first]), (True, order[first:]))
        for at, run in enumerate(tree.runs)
        if (layers := part.count(at))
    ]
    return tree._replace(runs=tuple(runs))


def order_by_recomputation(model: ModelSpec, first: int | None) -> tuple[int, ...]:
    """Return the run index of each layer, first to last, in the layout of :func:`layout_by_recomputation`.

    >>> tiny = ModelSpec(family="llama", hidden_size=8, intermediate_size=16, num_hidden_layers=4, num_attention_heads=2,
    ...                  num_key_value_heads=1, head_dim=4, vocab_size=10)
    >>> order_by_recomputation(tiny, 3), order_by_recomputation(tiny, None)
    ((0, 0, 0, 1), (0, 0, 0, 0))
    """
    order = runs_in_order(model)
    if first is None:
        return order
    whole = layout(model)
    at = {(run.kind, run.plain): index for index, run in enumerate(_in_two(model, first).runs)}
    return tuple(at[whole.runs[run].kind, layer >= first] for layer, run in enumerate(order))
