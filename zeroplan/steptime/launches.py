"""The CPU's time to launch a micro-batch's kernels, which bounds a step of small kernels.

The CPU runs ahead of the GPU, so a pass takes as long as the slower of the two. The counts are those of the engines' code. The
time of one kernel is that of a DGX H100. Hooks were measured on the host of our own H100, which needs 1.7 times as long for a
kernel: a virtual machine with shared cores, where the profiler of earlier steps was still attached (torch does not call
``cuptiFinalize``, which slows a step by 10 to 20 %: github.com/pytorch/pytorch/issues/144455). Leaves out DTensor's own work under
tensor parallelism, Transformer Engine's Python, CUDA graphs, and the optimizer's step.
"""

from typing import NamedTuple

from zeroplan.numeric import Float
from zeroplan.spec.compiled import COMPILED_BLOCKS
from zeroplan.spec.recipe import RecipeSpec, StepKernels

SOURCE = (
    "launches: one layer of Llama 3.2 1B on a DGX H100, github.com/NVIDIA/Fuser/issues/3507; hooks relative to them: "
    "tests/on_gpus/records, steps of 1.2B and 0.3B parameters, torch 2.11"
)
#: One kernel with the views and the modules' Python around it, on a DGX H100 (Xeon 8480C): 65 kernels in 1.014 ms, which is mostly
#: the CPU's time (transformers' forward of Llama 3.2 1B with one layer; github.com/NVIDIA/Fuser/issues/3507, ``torch-eager``).
#: torch.compile's 24 kernels of the same forward need 6.8 us each beyond their own time. [s]
_KERNEL_S: dict[StepKernels, float] = {"eager": 15.6e-6, "fused": 15.6e-6, "compiled": 6.8e-6}
#: Speed of the CPU beside our own H100 relative to a DGX H100's: there such a kernel takes 26 us, as 14 more blocks of 38 kernels
#: each took (18.7 - 5.0) ms more (forwards of Llama 3.2 1B whole and with two blocks, DeepSpeed stage 0; their quickest steps).
#: The following times, and those of ``stepping``, are our host's.
OUR_HOST = 15.6e-6 / 26e-6
#: Speed of the CPUs of Grace relative to a DGX H100's: torch's linear layer takes 37.1 us of the CPU on GB200 and 33.2 us on GH200,
#: 13.5 us on a DGX H100 (github.com/NVIDIA/TransformerEngine/issues/2053).
_GRACE = {"gb200": 13.48 / 37.08, "gb300": 13.48 / 37.08, "gh200": 13.48 / 33.17}
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

    layers: Float
    blocks: Float
    blocks_backward: Float
    ends: Float
    ends_backward: Float
    tensors: Float
    """Parameter tensors of the blocks; ``trained_tensors`` are those with a gradient."""
    trained_tensors: Float


class Launching(NamedTuple):
    """The CPU's time for one micro-batch. [s]"""

    forward: Float
    backward: Float


def host_speed(gpu: str) -> float:
    """Return the speed of the CPU beside a GPU relative to a DGX H100's: Grace is slower, every other CPU is assumed to be equal.

    >>> host_speed("h100-sxm-80gb"), round(host_speed("gb200-186gb"), 2)
    (1.0, 0.36)
    """
    return _GRACE.get(gpu.partition("-")[0], 1.0)


def launching(one: Launched, recipe: RecipeSpec, kernels: StepKernels, quicker: float, *, again: float) -> Launching:
    """Return the CPU's time for one micro-batch. [s]

    ``again``: the share of blocks that are recomputed; ``quicker``: the CPU's speed relative to a DGX H100's.
    """
    is_seen = recipe.recompute == "selective" and recipe.engine != "megatron" and COMPILED_BLOCKS not in recipe.fused_parts
    per_kernel, seen = _KERNEL_S[kernels], OUR_HOST * _SEEN_S if is_seen else 0.0
    sharded = recipe.engine != "deepspeed" or recipe.zero_stage == 3
    hooks = _HOOKS_S.get(recipe.engine, (0.0, 0.0)) if sharded else (0.0, 0.0)
    per_tensor = _HOOKS_TENSOR_S.get(recipe.engine, (0.0, 0.0))
    before, after = (OUR_HOST * (one.layers * each + one.tensors * more) for each, more in zip(hooks, per_tensor, strict=True))
    if recipe.engine == "deepspeed" and recipe.zero_stage in (1, 2):
        after = OUR_HOST * one.trained_tensors * _GRADIENT_S
    repeated = again * (one.blocks * (per_kernel + seen) + (before if recipe.engine == "deepspeed" else 0.0))
    forward = (one.blocks + one.ends) * per_kernel + again * one.blocks * seen + before
    backward = (one.blocks_backward + one.ends_backward) * per_kernel + after + repeated
    return Launching(forward / quicker, backward / quicker)
