"""What does a rank hold and send under DeepSpeed 0.19.8, ZeRO stages 0 to 3?"""

from __future__ import annotations

from zeroplan.engines.account import Account
from zeroplan.engines.deepspeed_stage12 import partitioned_account
from zeroplan.engines.optimizers import implementation
from zeroplan.errors import SpecError
from zeroplan.spec.batch import Batch
from zeroplan.spec.mesh import Mesh
from zeroplan.spec.model import ModelSpec
from zeroplan.spec.recipe import OptimizerImpl, RecipeSpec

#: Optimizers for which DeepSpeed has a fused kernel of its own (``ops/adam/fused_adam.py``, ``ops/lion/fused_lion.py``).
_OWN_KERNELS = ("adamw", "adam", "lion")


def account(model: ModelSpec, recipe: RecipeSpec, mesh: Mesh, batch: Batch) -> Account:
    """Memory and traffic of rank 0 in a step after the first two. [bytes]"""
    impl = optimizer_impl(recipe)
    return partitioned_account(model, recipe, mesh, batch, impl)


def optimizer_impl(recipe: RecipeSpec) -> OptimizerImpl:
    """How the optimizer steps: DeepSpeed's own fused kernel where it has one, else torch's default.

    Source: DeepSpeed 0.19.8, ``runtime/engine.py``, ``_configure_basic_optimizer``.

    >>> optimizer_impl(RecipeSpec(engine="deepspeed")), optimizer_impl(RecipeSpec(engine="deepspeed", optimizer="sgd"))
    ('fused', 'foreach')
    """
    if recipe.optimizer == "muon":
        raise SpecError("optimizer 'muon' with engine 'deepspeed' is not modelled; use engine 'fsdp2' or optimizer 'adamw'")
    if recipe.optimizer in _OWN_KERNELS and recipe.optimizer_impl in (None, "fused"):
        return "fused"
    return implementation(recipe.optimizer, recipe.optimizer_impl)
