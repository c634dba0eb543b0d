"""How long the CPU needs to launch the kernels of a micro-batch: a step of small kernels waits for it.

The CPU runs ahead of the GPU, so a pass takes as long as the slower of the two. The times are those of one host, whose CPU takes
7.2 us for the plainest launch (tests/on_gpus/records/h100-operators.csv); another CPU may be twice as fast. Leaves out DTensor's
own work under tensor parallelism, CUDA graphs, and the optimizer's step.
"""

from typing import NamedTuple

from zeroplan.numeric import Float
from zeroplan.spec.recipe import RecipeSpec, StepKernels

SOURCE = "measured on the host of one H100, tests/on_gpus/records: steps of 1.2B and 0.3B parameters, torch 2.11"
#: One kernel with the views, the modules' Python and autograd around it: (18.7 - 5.0) ms more for 14 more blocks of 38 kernels each
#: (forwards of Llama 3.2 1B whole and with two blocks, DeepSpeed stage 0; their quickest steps). torch.compile's graphs are
#: taken to need a tracked launch alone (``launch, sum, tracked``). [s]
_KERNEL_S: dict[StepKernels, float] = {"eager": 26e-6, "fused": 26e-6, "compiled": 8.2e-6}
#: What an engine's own code takes per block, forward and backward: what is left of the quickest steps of Llama 3.2 1B with 2,048
#: tokens, over 17 groups. DeepSpeed's stage 3 has hooks on every module. [s]
_HOOKS_S = {"fsdp2": (0.55e-3, 2.36e-3), "fsdp1": (1.2e-3, 1.4e-3), "deepspeed": (6.0e-3, 5.9e-3)}
#: The part of it that FSDP2 takes per tensor of a block: with 23 (LoRA of Llama 3.1 8B) beside 9. [s]
_HOOKS_TENSOR_S = {"fsdp2": (0.105e-3, 0.049e-3)}
#: DeepSpeed's hook of a gradient at stages 1 and 2, which copies it into a bucket: (44.1 - 37.0) ms for 146 of Llama 3.2 1B,
#: stage 1 beside stage 0. [s]
_GRADIENT_S = 49e-6
#: Per kernel of a block under selective checkpointing, whose Python sees every operator (torch 2.13, torch/utils/checkpoint.py,
#: ``_CachingTorchDispatchMode``): (86 - 44) ms over 16 blocks of 38 kernels. [s]
_SEEN_S = 70e-6


class Launched(NamedTuple):
    """Kernels of a micro-batch, and the layers that they are of."""

    layers: float
    blocks: float
    blocks_backward: float
    ends: float
    ends_backward: float
    tensors: float
    """Parameter tensors of the blocks, and those of them that get a gradient."""
    trained_tensors: float


class Launching(NamedTuple):
    """How long the CPU works on one micro-batch. [s]"""

    forward: Float
    backward: Float


def launching(one: Launched, recipe: RecipeSpec, kernels: StepKernels, quicker: float, *, again: float) -> Launching:
    """Return the CPU's time of a micro-batch. [s]

    ``again``: the share of blocks that are recomputed; ``quicker``: by how much the CPU is faster than the one that was measured.
    """
    per_kernel, seen = _KERNEL_S[kernels], _SEEN_S if recipe.recompute == "selective" and recipe.engine != "megatron" else 0.0
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
