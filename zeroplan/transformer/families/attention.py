"""Where attention is written down, and what only CUDA's kernels take, inside themselves."""

from zeroplan.ledger import OffGpu, Tag

LLAMA = "transformers 5.23, models/llama/modeling_llama.py, LlamaAttention.forward"
SDPA = "transformers 5.23, integrations/sdpa_attention.py, sdpa_attention_forward"
EAGER = "transformers 5.23, models/llama/modeling_llama.py, eager_attention_forward"
FLASH_BACKWARD = "torch 2.13, aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp, mha_bwd"
CHOICE = "torch 2.13, aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, can_use_mem_efficient_attention"
MATH = "torch 2.13, aten/src/ATen/native/transformers/attention.cpp, _scaled_dot_product_attention_math"

#: Of what a kernel takes inside itself; a comparison with a run that has no such kernel leaves it out by this tag.
SCRATCH = Tag(off_gpu=OffGpu.NO_TENSOR)
FLASH_SCRATCH = "scratch of the flash-attention backward kernel (CUDA)"
#: Of what a CPU's kernels do not make; a comparison with those leaves it out.
CUDA_ALONE = Tag(off_gpu=OffGpu.NOTHING)
