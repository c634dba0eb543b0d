"""The time of the optimizer's step: its memory traffic, or the CPU's launches for each tensor.

Adam in one fused kernel reads and writes weight and moments and reads the gradient. In the foreach and for-loop implementations
every operator reads and writes memory. The CPU runs ahead of the GPU, so the step takes as long as the slower of the two. DeepSpeed
copies and checks gradients around the optimizer and waits for the GPU in between, so the CPU's time is added.

Leaves out the products of Muon, and the launches of optimizers other than Adam.
"""

from typing import NamedTuple

from zeroplan.engines.account import Account
from zeroplan.engines.optimizers import implementation_of
from zeroplan.engines.precisions import widths
from zeroplan.ledger import Kind, bytes_by_kind
from zeroplan.numeric import Float, longest, shortest
from zeroplan.spec.mesh import Mesh
from zeroplan.spec.model import ModelSpec
from zeroplan.spec.recipe import ADAM, RecipeSpec
from zeroplan.steptime.compute import Rates
from zeroplan.steptime.efficiency import HOST_BYTES_PER_S, HOST_SOURCE, efficiency
from zeroplan.steptime.launches import OUR_HOST, host_speed
from zeroplan.steptime.parts import Does, Part
from zeroplan.transformer.params import trained_layout

#: Reads and writes of one element in a step of Adam. Fused: weight and both moments read and written, gradient read. With foreach
#: or a for-loop (torch 2.13, optim/adam.py, _multi_tensor_adam): decay 2, lerp 3, mul 2, addcmul 3, sqrt 2, div 2, add 2,
#: addcdiv 4.
_FUSED_ACCESSES, _UNFUSED_ACCESSES = 7.0, 20.0
_SOURCE = "torch 2.13, torch/optim/adam.py, _multi_tensor_adam and _fused_adam"
#: Bytes of Adam's states per parameter in an engine with master weights: the master weight and both moments.
HELD_BYTES = {"bf16-mixed": 12, "fp16-mixed": 12, "bf16": 6, "fp32": 12}
#: The CPU's time per tensor in a step of AdamW, by implementation: steps of 150 tensors of 500,000 elements, alone
#: (tests/on_gpus/records/h100-operators.csv). [s]
_TENSOR_S = {"fused": 1570e-6 / 150, "foreach": 2753e-6 / 150, "forloop": 21518e-6 / 150}
#: The CPU's extra time per DTensor (FSDP2): 12.5 ms for 310 tensors of Qwen3 0.6B, whose kernels take 2 ms
#: (tests/on_gpus/records, 512 tokens). [s]
_DTENSOR_S = 12.5e-3 / 310 - 2753e-6 / 150
#: DeepSpeed's Python per step, and per tensor of the model: stage 1 of Llama 3.2 1B with 16 blocks and 2 (the same records). [s]
_AROUND_S, _AROUND_TENSOR_S = 2.3e-3, 12.7e-6
#: The plainest launch (``launch, sum`` in h100-operators.csv). [s]
_LAUNCH_S = 7.2e-6
#: Kernels per tensor that the CPU waits for. Stage 0 checks every gradient for infinities: amax, amin, twice the four of isfinite,
#: two of logic, the copy of the result (DeepSpeed 0.19.8, runtime/utils.py, ``has_inf_or_nan``). Stage 3 casts each gradient and
#: takes its norm (runtime/zero/stage3.py, ``get_grad_norm_direct``).
_CHECKS = {0: 13.0, 3: 2.0}
_DEEPSPEED = "DeepSpeed 0.19.8, runtime/fp16/fused_optimizer.py, zero/stage_1_and_2.py and zero/stage3.py, step"


class _Step(NamedTuple):
    """An optimizer step's memory traffic and the CPU's time."""

    moved: Float
    """[bytes]"""
    launching_s: Float
    waits: bool = False
    """The CPU waits for the GPU during the step, so its time is added."""


def stepping(account: Account, model: ModelSpec, recipe: RecipeSpec, mesh: Mesh, rates: Rates, ranks_per_node: int) -> Part:
    """Return the time of the optimizer's step. [s]

    Optimizers other than Adam read and write their states and the weights once, and read the gradients.
    """
    if steps_on_host(recipe):
        takes = _moved(account, recipe, on_host=True) * ranks_per_node / HOST_BYTES_PER_S
        return _part(takes, recipe, "on the CPU, bound by the host's memory", HOST_SOURCE)
    share, usual = rates.share, efficiency(rates.gpu.architecture).bandwidth
    reached, quicker = (
        (share.bandwidth, share.launching) if share.stepping is None else (share.stepping, share.stepping / usual)
    )
    one = _deepspeeds(account, model, recipe) if _is_deepspeeds(recipe) else _torchs(account, model, recipe, mesh)
    moves = one.moved / (min(reached, 1.0) * rates.gpu.memory_bandwidth_bytes_per_s.value)
    launches = OUR_HOST * one.launching_s / (quicker * host_speed(rates.gpu.name)) + 0.0 * moves
    takes = moves + launches if one.waits else longest(moves, launches)
    return _part(takes, recipe, "bound by memory, or by launches for each tensor", _DEEPSPEED if one.waits else _SOURCE)


def steps_on_host(recipe: RecipeSpec) -> bool:
    """Whether the optimizer runs on the CPU."""
    if recipe.engine == "deepspeed":
        return recipe.deepspeed.offload_optimizer != "none"
    return recipe.offloads_states


def _part(takes: Float, recipe: RecipeSpec, where: str, source: str) -> Part:
    return Part(
        "optimizer step", takes, 0.0, f"{recipe.optimizer} ({implementation_of(recipe)}), {where}", source, Does.STEPPING
    )


def _moved(account: Account, recipe: RecipeSpec, *, on_host: bool = False) -> Float:
    """Return the bytes that the optimizer reads and writes."""
    sizes = bytes_by_kind(account.host if on_host else account.states)
    held = sizes.get(Kind.OPTIMIZER_STATE, 0)
    weights: Float = 1.0 * sizes.get(Kind.PARAMETERS, 0)
    gradients: Float = 1.0 * sizes.get(Kind.GRADIENTS, 0)
    if recipe.optimizer in ADAM and recipe.engine in ("ddp", "fsdp1", "fsdp2"):  # trained, and on this rank
        weights, gradients = shortest(weights, held / 2.0), shortest(gradients, held / 2.0)
    fused = implementation_of(recipe) == "fused" or recipe.optimizer not in ADAM
    return (1.0 if fused else _UNFUSED_ACCESSES / _FUSED_ACCESSES) * (2.0 * (held + weights) + gradients)


def _torchs(account: Account, model: ModelSpec, recipe: RecipeSpec, mesh: Mesh) -> _Step:
    """Return a step of torch's optimizer. Megatron's optimizer has few launches for all tensors."""
    per_tensor = _TENSOR_S[implementation_of(recipe)] + (_DTENSOR_S if recipe.engine == "fsdp2" else 0.0)
    tensors: Float = 0.0 if recipe.engine in ("megatron", "deepspeed") else 1.0 * _tensors(model) / mesh.pp
    if recipe.engine == "fsdp1" and not recipe.fsdp1.use_orig_params:
        tensors = model.num_hidden_layers + 1.0
    if recipe.engine == "ddp" and recipe.zero_stage == 1:
        tensors = tensors / mesh.dp_shard
    return _Step(_moved(account, recipe), per_tensor * tensors)


def _tensors(model: ModelSpec) -> int:
    """Return the number of trained tensors."""
    whole = trained_layout(model)
    return len(whole.embeddings) + sum(run.layers * len(run.parameters) for run in whole.runs) + len(whole.tail)


def _is_deepspeeds(recipe: RecipeSpec) -> bool:
    """Whether DeepSpeed wraps Adam: always, except in fp32 at stage 0."""
    wraps = recipe.zero_stage > 0 or widths(recipe.precision).name != "fp32"
    return recipe.engine == "deepspeed" and recipe.optimizer in ADAM and wraps


def _deepspeeds(account: Account, model: ModelSpec, recipe: RecipeSpec) -> _Step:
    """Return a step with DeepSpeed's copies and checks of gradients around the optimizer.

    Stages 1 to 3 take the gradients' norm in fp64, flatten and cast gradients, and copy updated weights back; stage 3, and fp16,
    scale gradients, too. Stage 0 casts and flattens all gradients, and takes one norm.
    """
    stage, given, master = (
        recipe.zero_stage,
        *((4, 4) if recipe.precision == "fp32" else (2, HELD_BYTES[recipe.precision] // 3)),
    )
    accesses = _FUSED_ACCESSES if implementation_of(recipe) == "fused" else _UNFUSED_ACCESSES
    cast = given + master if given != master else 0
    scale = 2 * master if stage in (0, 3) or recipe.precision == "fp16-mixed" else 0
    around = 2 * given + cast + 3 * master if stage == 0 else given + 8 + 8 + 2 * given + cast
    elements = bytes_by_kind(account.states).get(Kind.OPTIMIZER_STATE, 0) / HELD_BYTES[recipe.precision]
    moved = elements * (around + scale + accesses * master + master + given)
    per_tensor = _AROUND_TENSOR_S + _CHECKS.get(stage, 0.0) * _LAUNCH_S
    return _Step(moved, _AROUND_S + _tensors(model) * per_tensor, waits=True)
