"""The memory and traffic of a rank under DeepSpeed 0.19.8, ZeRO stages 0 to 3. Stages 1 and 2 are in ``stage12.py``."""

from collections.abc import Callable

from zeroplan.engines.account import Account
from zeroplan.engines.deepspeed.gathers import refuse_quantized
from zeroplan.engines.deepspeed.gradients import collects, sums_in_fp32
from zeroplan.engines.deepspeed.infinity import refuse_swapping
from zeroplan.engines.deepspeed.muon import refuse_with_muon
from zeroplan.engines.deepspeed.offload import offloads_optimizer, refuse
from zeroplan.engines.deepspeed.quantized_gradients import refuse_quantized_gradients
from zeroplan.engines.deepspeed.secondary import refuse_second
from zeroplan.engines.deepspeed.stage3 import sharded_account
from zeroplan.engines.deepspeed.stage12 import bf16_optimizer_account, partitioned_account, unpartitioned_account
from zeroplan.engines.optimizers import check_engine, implementation
from zeroplan.engines.passes import passes
from zeroplan.engines.pinned import with_offloaded_activations
from zeroplan.errors import SpecError
from zeroplan.spec.batch import Batch
from zeroplan.spec.mesh import Mesh
from zeroplan.spec.model import ModelSpec
from zeroplan.spec.recipe import ADAM, OptimizerImpl, RecipeSpec

#: A block recomputed to its end runs its last module's forward once more. After that, stage 3 releases the module's weight,
#: although its backward has begun and needs it (DeepSpeed 0.19.8, ``parameter_offload.py``, ``_post_forward_module_hook``).
_SELECTIVE = (
    "recompute 'selective' at stage 3 fails in DeepSpeed, which releases a weight that the backward still needs; use 'full' or "
    "'none', or stage 2"
)

#: Optimizers for which DeepSpeed has its own fused kernel (``ops/adam/fused_adam.py``, ``ops/lion/fused_lion.py``).
_OWN_KERNELS = ("adamw", "adam", "lion")


def account(model: ModelSpec, recipe: RecipeSpec, mesh: Mesh, batch: Batch) -> Account:
    """Return memory and traffic of rank 0 in the steady state of training, from the third step on. [bytes]

    ``precision`` in DeepSpeed's terms: ``bf16-mixed`` and ``fp16-mixed`` are ``bf16`` and ``fp16`` enabled (weights and
    gradients in 16 bits, an fp32 copy of the weights for the optimizer); ``bf16`` adds ``bf16_master_weights_and_grads`` and
    ``bf16_optimizer_states``; ``fp32`` enables neither. The model comes to the GPU in that dtype, by module, not by parameter.

    Leaves out weights stored in 8 bits (``zero_quantized_nontrainable_weights``), DeepSpeed's own expert groups, tensor and
    pipeline parallelism, ``torch_autocast``, ``communication_data_type``, scalars in memory. fp16 was read, not run.
    """
    impl = optimizer_impl(recipe)
    _refuse(recipe)
    if recipe.optimizer == "muon":
        refuse_with_muon(model, recipe)
    refuse_second(recipe, mesh)
    refuse_quantized(recipe)
    refuse_quantized_gradients(model, recipe, mesh)
    answer = _answer(recipe)(model, recipe, mesh, batch, impl)
    if not recipe.offload_activations:
        return answer
    kinds = passes(model, recipe, batch).kinds
    return with_offloaded_activations(answer, recipe.recompute, ((one.kind, one.block, len(one.blocks)) for one in kinds))


def _refuse(recipe: RecipeSpec) -> None:
    refuse(recipe)
    refuse_swapping(recipe)
    if recipe.offload_activations and recipe.offloads_states:
        raise SpecError(
            "offload_activations beside DeepSpeed's offload of optimizer or parameters is not modelled; use one of them"
        )
    _refuse_without_norm(recipe)
    if recipe.zero_stage == 3 and recipe.recompute == "selective":
        raise SpecError(_SELECTIVE)
    if recipe.zero_stage == 0 and recipe.precision == "bf16":
        raise SpecError("precision 'bf16' with engine 'deepspeed' needs ZeRO stage 1, 2 or 3; use 'bf16-mixed' at stage 0")
    if recipe.zero_stage == 0 and sums_in_fp32(recipe):
        raise SpecError("grad_accum_dtype 'fp32' needs ZeRO stage 1, 2 or 3 with engine 'deepspeed'; use 'param'")
    if recipe.zero_stage == 1 and sums_in_fp32(recipe) and offloads_optimizer(recipe):
        raise SpecError("grad_accum_dtype 'fp32' at stage 1 with offload_optimizer is not modelled; use stage 2")
    if recipe.zero_stage == 1 and sums_in_fp32(recipe) and recipe.precision != "bf16-mixed":
        raise SpecError(
            f"grad_accum_dtype 'fp32' at stage 1 with precision {recipe.precision!r} is not modelled; use 'bf16-mixed'"
        )


def _refuse_without_norm(recipe: RecipeSpec) -> None:
    """Raise SpecError as ``runtime/zero/config.py``, ``compute_grad_norm_valid``, and ``runtime/engine.py`` do."""
    if recipe.deepspeed.compute_grad_norm:
        return
    if recipe.zero_stage not in (1, 2):
        raise SpecError(f"compute_grad_norm=False at ZeRO stage {recipe.zero_stage} is refused by DeepSpeed; use stage 1 or 2")
    if recipe.zero_stage == 1 and sums_in_fp32(recipe):
        raise SpecError("compute_grad_norm=False with grad_accum_dtype 'fp32' at stage 1 is refused by DeepSpeed; use stage 2")


def _answer(recipe: RecipeSpec) -> Callable[[ModelSpec, RecipeSpec, Mesh, Batch, OptimizerImpl], Account]:
    """Return the account function of the recipe's DeepSpeed optimizer (``runtime/engine.py``, ``_do_optimizer_sanity_check``)."""
    if recipe.zero_stage == 3:
        return sharded_account
    if recipe.zero_stage == 0:
        return unpartitioned_account
    return bf16_optimizer_account if collects(recipe) else partitioned_account


def steps_in_own_kernel(recipe: RecipeSpec) -> bool:
    """Whether the optimizer steps in DeepSpeed's own fused kernel instead of torch's."""
    torchs = recipe.deepspeed.torch_adam and recipe.optimizer in ADAM
    return recipe.optimizer in _OWN_KERNELS and recipe.optimizer_impl in (None, "fused") and not torchs


def optimizer_impl(recipe: RecipeSpec) -> OptimizerImpl:
    """Return the implementation of the step: DeepSpeed's own fused kernel if it has one, else torch's default.

    Source: DeepSpeed 0.19.8, ``runtime/engine.py``, ``_configure_basic_optimizer``.

    >>> optimizer_impl(RecipeSpec(engine="deepspeed")), optimizer_impl(RecipeSpec(engine="deepspeed", optimizer="sgd"))
    ('fused', 'foreach')
    """
    check_engine(recipe)
    if steps_in_own_kernel(recipe) or recipe.optimizer == "muon":  # the Adam beside it is DeepSpeed's own
        return "fused"
    return implementation(recipe.optimizer, recipe.optimizer_impl, on_host=offloads_optimizer(recipe))
