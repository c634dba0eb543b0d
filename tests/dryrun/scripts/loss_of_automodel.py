"""A head and NeMo AutoModel's masked cross-entropy, in its own way: ``loss_of_automodel.py RANKS wide|narrow``.

Prints the bytes above the beginning at the peak of the forward, after it, and at the peak of the backward.
"""

import sys

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.functional import cross_entropy

ranks, kind = int(sys.argv[1]), sys.argv[2]
batch, length, width, vocabulary = 2, 256, 64, 32768


def masked_cross_entropy(logits, labels):
    """Cast, gather, and compare, as MaskedCrossEntropy.forward does (components/loss/masked_ce.py, 36044ad3)."""
    logits, labels = logits.view(-1, logits.size(-1)), labels.view(-1)
    if kind == "wide":
        logits = logits.float()
    if isinstance(logits, DTensor):
        logits = logits.full_tensor()
    return cross_entropy(logits, labels, reduction="sum") / labels.numel()


mesh = None
if ranks > 1:
    torch.distributed.init_process_group("nccl")
    mesh = init_device_mesh("cuda", (ranks,))
hidden = torch.randn(batch, length, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
head = torch.randn(vocabulary // ranks, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
labels = torch.zeros(batch, length, dtype=torch.int64, device="cuda")
optimizer = torch.optim.SGD([hidden, head])
for _ in range(2):
    optimizer.zero_grad(set_to_none=False)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    output = hidden @ head.T
    output = output if mesh is None else DTensor.from_local(output, mesh, [Shard(-1)])
    loss = masked_cross_entropy(output, labels)
    forward, kept = torch.cuda.max_memory_allocated() - before, torch.cuda.memory_allocated() - before
    torch.cuda.reset_peak_memory_stats()
    loss.backward()
    print("BYTES", forward, kept, torch.cuda.max_memory_allocated() - before, file=sys.stderr, flush=True)
    del output, loss
    optimizer.step()
