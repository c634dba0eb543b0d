"""Constants that several modules share: tags by which engines recognise tensors, places of norms, and sources."""

from zeroplan.ledger import Kind, Module, OffGpu, Role, Tag
from zeroplan.transformer.blocks import At, Place

SAVED = Kind.ACTIVATIONS
GRADIENT = Kind.ACTIVATION_GRADIENTS
TEMPORARY = Kind.TEMPORARY

BLOCK_INPUT, INCOMING = Tag(Role.BLOCK_INPUT), Tag(Role.INCOMING)
NORMALISED = Tag(Role.NORMALISED)
LABELS = Tag(Role.LABELS)
OF_THE_BATCH = Tag(Role.BATCH)
"""Token ids and positions, which context-parallel ranks split."""
HEAD_INPUT = Tag(Role.OPERAND, Module.HEAD)
"""The input that the head's matrix product saves. It is freed before its gradient reaches the next operator."""
HELD_NORM = Tag(Role.NAMED, Module.FINAL_NORM)
"""The final norm's output, if only a Python variable of the model's ``forward`` keeps it alive."""

# By these tags a comparison with a CPU run skips tensors or counts them differently.
SCRATCH = Tag(off_gpu=OffGpu.NO_TENSOR)
"""Workspace inside a CUDA kernel."""
CUDA_ALONE = Tag(off_gpu=OffGpu.NOTHING)
"""A tensor that only CUDA makes."""
TWICE_ON_CPU = Tag(off_gpu=OffGpu.TWICE)
"""Attention's output, if the CPU kernel writes it in another order and copies it."""
STATISTICS = Tag(off_gpu=OffGpu.COMPUTE_DTYPE)
"""LayerNorm's statistics: fp32 on CUDA, the compute dtype on a CPU."""

AT_ATTENTION_NORM, AT_MLP_NORM = Place(At.NORM, Module.ATTENTION_NORM), Place(At.NORM, Module.MLP_NORM)
AT_FINAL_NORM = Place(At.FINAL_NORM, Module.FINAL_NORM)
AFTER_ATTENTION_AND_MLP = Place(At.NORM, Module.AFTER_ATTENTION_NORM), Place(At.NORM, Module.AFTER_MLP_NORM)

FLASH_SCRATCH = "scratch of the flash-attention backward kernel (CUDA)"
FLASH_BACKWARD = "torch 2.13, aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp, mha_bwd"
