"""Modules that peft trains whole beside adapters (``modules_to_save``), under DDP and autocast.

peft makes adapters of 16-bit weights in fp32, but copies a module with its dtype: peft 0.21, ``tuners/tuners_utils.py``,
``cast_adapter_dtype``, and ``utils/other.py``, ``ModulesToSaveWrapper.update``. So gradients, buckets and optimizer states of these
copies are in 16 bits, unless the model was prepared in fp32 before (``prepare_model_for_kbit_training``).
"""

from functools import lru_cache

from zeroplan.engines.formulas import product
from zeroplan.engines.optimizers import implementation_of, state_lines, step_temporary_lines, whole_tensors
from zeroplan.engines.passes import Passes
from zeroplan.engines.precisions import widths
from zeroplan.engines.rows import Row, row_of
from zeroplan.ledger import Line
from zeroplan.spec.model import ModelSpec
from zeroplan.spec.recipe import RecipeSpec
from zeroplan.transformer.parameters import Parameter
from zeroplan.transformer.params import is_frozen, trained_layout

Lines = tuple[Line, ...]
_NARROW = 2
"""Bytes of an element of such a copy."""


def are_narrow(model: ModelSpec, recipe: RecipeSpec) -> bool:
    """Whether trained copies of whole modules have 16 bits beside adapters in fp32."""
    adapter = model.adapter
    return adapter is not None and bool(adapter.saved) and widths(recipe.precision).mixed and not model.upcasts_ends


@lru_cache(maxsize=256)
def row_in_fp32(model: ModelSpec) -> Row:
    """Return the trained parameters as numbers of fp32: two elements of a copy in 16 bits are one."""

    def halved(part: tuple[Parameter, ...]) -> tuple[Parameter, ...]:
        return tuple(one._replace(shape=(one.shape[0], one.shape[1] * _NARROW // 4)) for one in part)

    tree = trained_layout(model)
    return row_of(model, tree._replace(embeddings=halved(tree.embeddings), tail=halved(tree.tail)))


def in_fp32(these: Passes, model: ModelSpec) -> Passes:
    """Return the passes with the head's gradient counted as in :func:`row_in_fp32`."""
    if is_frozen(model, "head"):
        return these
    points = tuple(
        [
            point._replace(
                gradients=point.gradients * _NARROW // 4, current_gradient=point.current_gradient * _NARROW // 4, live_casts=0
            )
            for point in these.head.points
        ]
    )
    return these._replace(head=these.head._replace(points=points))


def optimizer_lines(model: ModelSpec, recipe: RecipeSpec) -> tuple[Lines, Lines]:
    """Return states and step temporaries. [bytes]

    Optimizers step over the tensors of one dtype, then over those of the other. Their variables still hold the first temporaries
    when they make the second.
    """
    impl, every = implementation_of(recipe), whole_tensors(trained_layout(model))
    held, passing = list[Line](), list[Line]()
    for in_block, width, whose in ((True, 4, "adapters"), (False, _NARROW, "modules trained whole")):
        tensors = [one for one in every if one.in_block is in_block]
        held += _named(state_lines(recipe.optimizer, impl, tensors, width), whose)
        passing += _named(step_temporary_lines(recipe.optimizer, impl, tensors, width), whose)
    return tuple(held), tuple(passing)


def _named(lines: Lines, whose: str) -> Lines:
    return tuple([one._replace(reason=f"{one.reason}, of {whose}", formula=product(1, int(one.n_bytes))) for one in lines])
