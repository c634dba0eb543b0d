"""The CPU's time to launch a micro-batch's kernels, which bounds a step of small kernels.

The CPU runs ahead of the GPU, so a pass takes as long as the slower of the two. The times are those of one host, whose CPU takes
7.2 us for the plainest launch (tests/on_gpus/records/h100-operators.csv); another CPU may be twice as fast. Leaves out DTensor's
own work under tensor parallelism, CUDA graphs, and the optimizer's step.
"""

from typing import NamedTuple

from zeroplan.numeric import Float
from zeroplan.spec.compiled import COMPILED_BLOCKS
from zeroplan.spec.recipe import RecipeSpec, StepKernels

SOURCE = "measured on the host of one H100, tests/on_gpus/records: steps of 1.2B and 0.3B parameters, torch 2.11"
#: One kernel with the views, the modules' Python and autograd around it: 14 more blocks of 38 kernels each took (18.7 - 5.0) ms
#: more (forwards of Llama 3.2 1B whole and with two blocks, DeepSpeed stage 0; their quickest steps). A kernel of torch.compile's
#: graphs is assumed to need only a tracked launch (``launch, sum, tracked``). [s]
_KERNEL_S: dict[StepKernels, float] = {"eager": 26e-6, "fused": 26e-6, "compiled": 8.2e-6}
#: Time of an engine's own code per block, in forward and backward: the rest of the quickest steps of Llama 3.2 1B with 2,048
#: tokens, over 17 groups. DeepSpeed's stage 3 has hooks on every module. [s]
_HOOKS_S = {"fsdp2": (0.55e-3, 2.36e-3), "fsdp1": (1.2e-3, 1.4e-3), "deepspeed": (6.0e-3, 5.9e-3)}
#: Time of FSDP2's code per parameter tensor of a block: 23 tensors (LoRA of Llama 3.1 8B) compared with 9. [s]
_HOOKS_TENSOR_S = {"fsdp2": (0.105e-3, 0.049e-3)}
#: DeepSpeed's hook at stages 1 and 2, which copies a gradient into a bucket: (44.1 - 37.0) ms for the 146 gradients of Llama 3.2
#: 1B, stage 1 compared with stage 0. [s]
_GRADIENT_S = 49e-6
#: Per kernel of a block under selective checkpointing, which runs Python for it (torch 2.13, torch/utils/checkpoint.py,
#: ``_CachingTorchDispatchMode``): (86 - 44) ms over 16 blocks of 38 kernels. [s]
_SEEN_S = 70e-6


class Launched(NamedTuple):
    """Counts of a micro-batch's layers, kernels and parameter tensors."""

    layers: float
    blocks: float
    blocks_backward: float
    ends: float
    ends_backward: float
    tensors: float
    """Parameter tensors of the blocks; ``trained_tensors`` are those with a gradient."""
    trained_tensors: float


class Launching(NamedTuple):
    """The CPU's time for one micro-batch. [s]"""

    forward: Float
    backward: Float


def launching(one: Launched, recipe: RecipeSpec, kernels: StepKernels, quicker: float, *, again: float) -> Launching:
    """Return the CPU's time for one micro-batch. [s]

    ``again``: the share of blocks that are recomputed; ``quicker``: the CPU's speed relative to the measured CPU.
    """
    is_seen = recipe.recompute == "selective" and recipe.engine != "megatron" and COMPILED_BLOCKS not in recipe.fused_parts
    per_kernel, seen = _KERNEL_S[kernels], _SEEN_S if is_seen else 0.0
    sharded = recipe.engine != "deepspeed" or recipe.zero_stage == 3
    hooks = _HOOKS_S.get(recipe.engine, (0.0, 0.0)) if sharded else (0.0, 0.0)
    per_tensor = _HOOKS_TENSOR_S.get(recipe.engine, (0.0, 0.0))
    before, after = (one.layers * each + one.tensors * more for each, more in zip(hooks, per_tensor, strict=True))
    if recipe.engine == "deepspeed" and recipe.zero_stage in (1, 2):
        after = one.trained_tensors * _GRADIENT_S
    repeated = again * (one.blocks * (per_kernel + seen) + (before if recipe.engine == "deepspeed" else 0.0))
    forward = (one.blocks + one.ends) * per_kernel + again * one.blocks * seen + before
    backward = (one.blocks_backward + one.ends_backward) * per_kernel + after + repeated
    return Launching(forward / quicker, backward / quicker)
