"""The baseline of DeepSpeed's example of bf16 master weights (DeepSpeedExamples, training/bf16_master_weight, on GitHub).

Run as a program, since DeepSpeed patches torch for good. It writes to the file that it is given the highest and the last value
of ``memory_allocated``, without and with every block checkpointed. [bytes]
"""

from __future__ import annotations

import json
import logging
import os
import sys
import warnings
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parents[3]))
os.environ.update(DS_ACCELERATOR="cpu", HF_HUB_OFFLINE="1")

import deepspeed
import torch
from deepspeed.utils import logger
from torch import nn
from torch.utils.checkpoint import checkpoint

from zeroplan.catalog.model import model
from zeroplan.ledger import Phase
from zeroplan.spec.job import JobSpec
from zeroplan.spec.mesh import MeshSpec
from zeroplan.spec.recipe import RecipeSpec
from zeroplan.units import MIB
from zeroplan.verify.fake_cuda.fake_tensors import fake_tensors
from zeroplan.verify.fake_parts.engine import fake_parts_of_engine
from zeroplan.verify.training.run import fake_ranks
from zeroplan.verify.watching.replay import replay
from zeroplan.verify.watching.tracker import Tracker

if TYPE_CHECKING:
    from zeroplan.verify.watching.recording import Recording

WIDTH, LAYERS, HEADS, VOCAB, SEQUENCE, RANKS, STEPS = 4096, 32, 32, 50000, 512, 4, 2

#: configs/baseline.json, with one sequence per GPU. Until July 2026 (github.com/deepspeedai/DeepSpeed/pull/8189) DeepSpeed
#: made linear layers memory-efficient only in models built under ``zero.Init``; this one is built before.
BASELINE = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 1,
    "steps_per_print": 10**9,
    "bf16": {"enabled": True},
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_bucket_size": 50_000_000,
        "stage3_param_persistence_threshold": 0,
        "memory_efficient_linear": False,
    },
}
#: aten/src/ATen/cuda/CublasHandlePool.cpp, getChosenWorkspaceSize, compute capability 9.
CUBLAS_ON_H100 = 32 * MIB


class Block(nn.Module):
    """Attention and MLP, each normalised after its output is added to the residual."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.after_attention, self.after_mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attend, and return attention weights too, as is torch's default."""
        attended, _ = self.attention(x, x, x)
        x = self.after_attention(x + attended)
        projected = self.mlp(x)
        return self.after_mlp(x + projected)


class SimpleTransformer(nn.Module):
    """Two embeddings, blocks, and a head with a bias."""

    def __init__(self, *, checkpointed: bool) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.embedding, self.positions = nn.Embedding(VOCAB, WIDTH), nn.Embedding(SEQUENCE, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.output = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits of all tokens."""
        positions = torch.arange(tokens.shape[1]).unsqueeze(0).expand(tokens.shape[0], -1)
        x = self.embedding(tokens) + self.positions(positions)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
        return self.output(x)


def example(*, checkpointed: bool) -> Recording:
    """Run the example's loop as rank 0 of 4.

    The example builds the model in host memory and moves it whole to the GPU, in bf16. Here it is built in bf16 at once. Torch's
    fused AdamW stands for DeepSpeed's own, which needs a GPU.
    """
    recipe = RecipeSpec(engine="deepspeed", zero_stage=3)
    job, tracker = JobSpec(model=model("llama-2-7b"), mesh=MeshSpec(dp_shard=RANKS), recipe=recipe), Tracker()
    with fake_ranks(job, 0, "cpu"), fake_parts_of_engine(recipe), fake_tensors(tracker), tracker:
        torch.set_default_dtype(torch.bfloat16)
        net = SimpleTransformer(checkpointed=checkpointed)
        torch.set_default_dtype(torch.float32)
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, weight_decay=0.01, fused=True)
        import_module("deepspeed.comm.torch").build_shm_op = lambda: None  # tests/stale_lock.py
        _loop(deepspeed.initialize(model=net, optimizer=optimizer, config=BASELINE)[0], tracker)
    return tracker.recording


def _loop(engine: deepspeed.DeepSpeedEngine, tracker: Tracker) -> None:
    """Run the example's loop. It holds logits until the next ones are there."""
    loss_of = nn.CrossEntropyLoss()
    for step in range(STEPS):
        tracker.enter(Phase.FORWARD, step)
        tokens, labels = (torch.randint(0, VOCAB, (1, SEQUENCE)) for _ in range(2))
        logits = engine(tokens)
        loss = loss_of(logits.view(-1, VOCAB), labels.view(-1))
        tracker.enter(Phase.BACKWARD, step)
        loss.backward()
        tracker.enter(Phase.STEP, step)
        engine.step()
    tracker.enter(Phase.INIT, STEPS)


def main(answer: str) -> None:
    """Run the example without and with checkpoints."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logger.setLevel(logging.ERROR)
    runs = {"plain": example(checkpointed=False), "checkpointed": example(checkpointed=True)}
    Path(answer).write_text(json.dumps({name: _shown(recording) for name, recording in runs.items()}))


def _shown(recording: Recording) -> dict[str, int]:
    allocated = replay(recording, workspace_bytes=CUBLAS_ON_H100).allocated
    return {"most": max(allocated), "last": allocated[recording.spans[-1].start]}


if __name__ == "__main__":
    main(sys.argv[1])
