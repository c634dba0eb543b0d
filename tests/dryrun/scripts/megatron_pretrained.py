"""Megatron-Core's BERT and T5, for the figures that :mod:`tests.engines.test_megatron_pretrained` stores.

``pip install --no-deps megatron-core==0.16.1``, then ``zeroplan dryrun --gpus 8 --gpu a100-sxm-80gb --json --
tests/dryrun/scripts/megatron_pretrained.py t5 4`` (or ``bert 2``: the second of two pipeline stages). The layers are Megatron's
local ones. Its fused softmax needs CUDA; the script replaces it with one that keeps its result, as the fused softmax does.
"""

import sys
from os import environ

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.fusions.fused_softmax import FusedScaleMaskSoftmax
from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
from megatron.core.models.bert.bert_model import BertModel
from megatron.core.models.T5 import t5_spec
from megatron.core.models.T5.t5_model import T5Model
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import TransformerConfig

BATCH, ENCODER, DECODER, VOCABULARY = 4, 512, 128, 29184


class Softmax(torch.autograd.Function):
    """Allocates and keeps what ``scaled_masked_softmax_cuda`` does, and computes nothing."""

    @staticmethod
    def forward(ctx, scores, _mask):
        made = torch.empty_like(scores)
        ctx.save_for_backward(made)
        return made

    @staticmethod
    def backward(ctx, gradient):
        _ = ctx.saved_tensors
        return torch.empty_like(gradient), None


FusedScaleMaskSoftmax.forward = lambda _self, scores, mask, *_: Softmax.apply(scores, mask)
t5_spec.TENorm = WrappedTorchNorm


def configured(**shape):
    return TransformerConfig(
        bf16=True, params_dtype=torch.bfloat16, gradient_accumulation_fusion=False, masked_softmax_fusion=True,
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(), **shape,
    )  # fmt: skip


def zeros(*shape, dtype=torch.int64):
    return torch.zeros(BATCH, *shape, dtype=dtype, device="cuda")


def bert():
    config = configured(num_layers=12, hidden_size=1024, num_attention_heads=16)
    model = BertModel(
        config, num_tokentypes=2, transformer_layer_spec=bert_layer_local_spec, vocab_size=VOCABULARY, max_sequence_length=ENCODER,
        pre_process=False, share_embeddings_and_output_weights=True,
    )  # fmt: skip

    def loss(wrapped):
        received = torch.empty(ENCODER, BATCH, 1024, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        model.set_input_tensor(received)
        every, order = wrapped(zeros(ENCODER), zeros(ENCODER) + 1, lm_labels=zeros(ENCODER))
        return every.float().sum() + torch.nn.functional.cross_entropy(order.float(), zeros())

    return config, model, loss


def t5():
    config = configured(num_layers=12, hidden_size=768, num_attention_heads=12)
    specs = t5_spec.get_t5_encoder_with_local_block_spec(12), t5_spec.get_t5_decoder_with_local_block_spec(12)
    model = T5Model(
        config, config, *specs, vocab_size=VOCABULARY, max_sequence_length=ENCODER, share_embeddings_and_output_weights=True
    )

    def loss(wrapped):
        pairs = ((ENCODER, ENCODER), (DECODER, DECODER), (DECODER, ENCODER))
        masks = (zeros(1, *pair, dtype=torch.bool) for pair in pairs)
        return wrapped(zeros(ENCODER), zeros(DECODER), *masks, lm_labels=zeros(DECODER)).float().sum()

    return config, model, loss


torch.distributed.init_process_group("nccl")
torch.cuda.set_device(int(environ["LOCAL_RANK"]))
parallel_state.initialize_model_parallel(tensor_model_parallel_size=int(sys.argv[2]))
tensor_parallel.model_parallel_cuda_manual_seed(1)
config, model, loss = {"bert": bert, "t5": t5}[sys.argv[1]]()
model = model.cuda().bfloat16()
wrapped = DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model)
masters = [torch.nn.Parameter(one.detach().clone().float()) for one in model.parameters()]
optimizer = torch.optim.AdamW(masters, fused=True)
for one in masters:
    one.grad = torch.zeros_like(one)
optimizer.step()
for one in masters:
    one.grad = None
for _ in range(2):
    for _ in range(2):
        loss(wrapped).backward()
    optimizer.step()
