"""Optimizer states that stay in memory although DeepSpeed steps with others."""

from zeroplan.engines.formulas import sized
from zeroplan.ledger import Kind, Line, Moment
from zeroplan.spec.recipe import RecipeSpec

_SOURCE = "torch 2.13, torch/optim/adagrad.py, Adagrad.__init__; DeepSpeed 0.19.8, runtime/engine.py, basic_optimizer"
_REASON = "Adagrad's sums for the whole model, made when the optimizer was built; DeepSpeed steps with others"


def abandoned_states(recipe: RecipeSpec, n_elements: int, element: int) -> tuple[Line, ...]:
    """Return Adagrad's states of the ``n_elements`` parameter elements that it was built for. [bytes]

    Adagrad makes its sums in its constructor, other optimizers in their first step. DeepSpeed then gives the optimizer its own
    tensors, and keeps the optimizer. At stage 0 in fp32 it leaves the parameters unchanged; under ``zero.Init`` parameters have
    no elements by then. The sums have the dtype of the model when the optimizer is built, here the compute dtype.

    >>> [line.n_bytes for line in abandoned_states(RecipeSpec(engine="deepspeed", zero_stage=2, optimizer="adagrad"), 1000, 2)]
    [2000]
    """
    keeps_parameters = recipe.zero_stage == 0 and recipe.precision == "fp32"
    has_none = recipe.zero_stage == 3 and recipe.deepspeed.zero_init
    if recipe.optimizer != "adagrad" or keeps_parameters or has_none:
        return ()
    return (sized(Kind.OPTIMIZER_STATE, element, n_elements, _REASON, _SOURCE),)


def beside(moments: tuple[Moment, ...], lines: tuple[Line, ...]) -> tuple[Moment, ...]:
    """Return the moments with these lines added."""
    return tuple(moment._replace(lines=(*moment.lines, *lines)) for moment in moments)
