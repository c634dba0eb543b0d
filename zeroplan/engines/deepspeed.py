"""What does a rank hold and send under DeepSpeed 0.19.8, ZeRO stages 0 to 3?"""

from collections.abc import Callable

from zeroplan.engines.account import Account
from zeroplan.engines.deepspeed_stage3 import sharded_account
from zeroplan.engines.deepspeed_stage12 import partitioned_account
from zeroplan.engines.deepspeed_whole import bf16_optimizer_account, unpartitioned_account
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
    return _answer(recipe)(model, recipe, mesh, batch, impl)


def _answer(recipe: RecipeSpec) -> Callable[[ModelSpec, RecipeSpec, Mesh, Batch, OptimizerImpl], Account]:
    """Which of DeepSpeed's optimizers takes this recipe (``runtime/engine.py``, ``_do_optimizer_sanity_check``)."""
    stage, sums_in_fp32 = recipe.zero_stage, recipe.deepspeed.grad_accum_dtype == "fp32" and recipe.precision != "fp32"
    if stage == 3:
        return sharded_account
    if stage == 0:
        return unpartitioned_account
    if stage == 1 and sums_in_fp32:
        return bf16_optimizer_account
    return partitioned_account


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
