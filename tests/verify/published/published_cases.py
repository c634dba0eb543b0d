"""Runs whose peak memory was published, set up as their sources ran them: model, engine and loop.

Models follow their published architectures, and loops do what the sources do between two steps. Llama runs on fake tensors, the
small recipe on real ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional

from tests.verify.watching.unwatched import plain_kernels
from zeroplan.catalog.model import model
from zeroplan.ledger import Phase
from zeroplan.spec.job import JobSpec
from zeroplan.spec.mesh import MeshSpec
from zeroplan.spec.recipe import RecipeSpec
from zeroplan.verify.fake_cuda.fake_tensors import fake_tensors
from zeroplan.verify.training.recomputation import checkpoint_options
from zeroplan.verify.training.run import fake_ranks, run
from zeroplan.verify.training.workload import Workload
from zeroplan.verify.watching.replay import replay
from zeroplan.verify.watching.tracker import Tracker

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from zeroplan.spec.recipe import Recompute
    from zeroplan.verify.watching.recording import Recording


def shown_peaks(recording: Recording, *, workspace_bytes: int) -> dict[tuple[int, Phase], int]:
    """Return the highest value of ``memory_allocated`` in each phase of each step. [bytes]"""
    shown = replay(recording, workspace_bytes=workspace_bytes).allocated
    ends = [span.start for span in recording.spans[1:]] + [recording.now]
    peaks: dict[tuple[int, Phase], int] = {}
    for span, end in zip(recording.spans, ends, strict=True):
        key = span.step, span.phase
        peaks[key] = max(peaks.get(key, 0), *shown[span.start : end + 1])
    return peaks


# --- Llama 2 as torchtitan had it in March 2024 (github.com/pytorch/torchtitan, commit 83c879f18) -----------------------


class RootMeanSquareNorm(nn.Module):
    """RMSNorm that normalises in fp32 and scales in the input's dtype."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise the last dimension."""
        return _normalised(x.float()).type_as(x) * self.weight


def _normalised(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)


class Attention(nn.Module):
    """Causal attention. Rotary positions are products of complex numbers, in fp32."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        """Attend within each sequence. ``x`` has the tokens of all sequences in one row."""
        shape = (-1, turns.shape[0], self.heads, x.shape[1] // self.heads)
        q, k, v = self.q(x), self.k(x), self.v(x)
        q, k, v = q.view(shape), k.view(shape), v.view(shape)
        q, k = _turned(q, k, turns)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        output = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        output = output.transpose(1, 2).contiguous()
        return self.o(output.view(x.shape[0], -1))


def _turned(q: torch.Tensor, k: torch.Tensor, turns: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    q_pairs = torch.view_as_complex(q.float().reshape(*q.shape[:-1], -1, 2))
    k_pairs = torch.view_as_complex(k.float().reshape(*k.shape[:-1], -1, 2))
    turns = turns.view(1, q_pairs.shape[1], 1, q_pairs.shape[3])
    q_turned = torch.view_as_real(q_pairs * turns).flatten(3)
    k_turned = torch.view_as_real(k_pairs * turns).flatten(3)
    return q_turned.type_as(q), k_turned.type_as(k)


class GatedMlp(nn.Module):
    """The MLP of Llama."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate, self.down, self.up = (
            nn.Linear(width, inner, bias=False), nn.Linear(inner, width, bias=False), nn.Linear(width, inner, bias=False),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply with the gate, and project down."""
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Norm, attention, norm, MLP."""

    def __init__(self, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.attention, self.mlp = Attention(width, heads), GatedMlp(width, inner)
        self.before_attention, self.before_mlp = RootMeanSquareNorm(width), RootMeanSquareNorm(width)

    def forward(self, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        """Add attention and MLP to the residual."""
        h = x + self.attention(self.before_attention(x), turns)
        return h + self.mlp(self.before_mlp(h))


class Llama(nn.Module):
    """Llama 2. The model casts its logits to fp32, and keeps complex rotations for 65,536 positions."""

    def __init__(self, *, width: int, heads: int, inner: int, layers: int, vocab: int) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(vocab, width)
        self.register_buffer("turns", torch.empty(2 * 32768, width // heads // 2, dtype=torch.complex64), persistent=False)
        self.layers = nn.ModuleList(Block(width, heads, inner) for _ in range(layers))
        self.norm, self.output = RootMeanSquareNorm(width), nn.Linear(width, vocab, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits of all tokens in fp32."""
        h = self.embeddings(tokens)
        turns = self.turns[0 : tokens.shape[1]]
        h = h.view(-1, h.shape[-1])
        for layer in self.layers:
            h = layer(h, turns)
        h = self.norm(h)
        h = h.view(*tokens.shape, -1)
        return self.output(h).float()


LLAMA_7B = {"width": 4096, "heads": 32, "inner": 11008, "layers": 32, "vocab": 32000}


def torchtitan(recompute: Recompute, *, ranks: int = 8, batch: tuple[int, int] = (8, 2048), steps: int = 2) -> Recording:
    """Run torchtitan's loop: gradients are freed at the start of the next step, logits only when the next ones replace them.

    The source used a nightly torch of March 2024 and its defaults for checkpoints, with early stop. Here torch 2.13 runs.
    """
    job, tracker = JobSpec(model=model("llama-2-7b"), mesh=MeshSpec(dp_shard=ranks)), Tracker()
    with fake_ranks(job, 0, "cpu") as mesh, fake_tensors(tracker):
        return _steps(tracker, mesh, recompute, batch=batch, steps=steps)


def _steps(tracker: Tracker, mesh: DeviceMesh, recompute: Recompute, *, batch: tuple[int, int], steps: int) -> Recording:
    with tracker:
        llama = Llama(**LLAMA_7B)
        _sharded(llama, mesh, recompute)
        optimizer = torch.optim.AdamW(llama.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, foreach=True)
        for step in range(steps):
            tracker.enter(Phase.FORWARD, step)
            tokens, labels = (torch.randint(0, 32000, batch) for _ in range(2))
            optimizer.zero_grad()
            logits = llama(tokens)
            loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(0, 1))
            tracker.enter(Phase.BACKWARD, step)
            loss.backward()
            tracker.enter(Phase.STEP, step)
            nn.utils.clip_grad_norm_(llama.parameters(), 1.0, foreach=True)
            optimizer.step()
        tracker.enter(Phase.INIT, steps)
    return tracker.recording


def _sharded(llama: Llama, mesh: DeviceMesh, recompute: Recompute) -> None:
    """Checkpoint each block and shard it as its own FSDP2 unit. The last one is not resharded after its forward."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    options = {**checkpoint_options(recompute), "early_stop": True}
    del options["use_reentrant"]  # the wrapper sets it
    for number, block in enumerate(llama.layers):
        wrapped = checkpoint_wrapper(block, **options)
        fully_shard(wrapped, mesh=mesh, mp_policy=policy, reshard_after_forward=number < len(llama.layers) - 1)
        llama.layers[number] = wrapped
    fully_shard(llama, mesh=mesh, mp_policy=policy)


# --- twenty layers of the recipe for ZeroRedundancyOptimizer (docs.pytorch.org/tutorials/recipes/zero_redundancy_optimizer) ---


def zero_recipe(*, zero_stage: Literal[0, 1]) -> Recording:
    """Run the recipe's one step under DDP, as rank 0 of 2, on real tensors."""
    recipe = RecipeSpec(engine="ddp", zero_stage=zero_stage, precision="fp32", optimizer="adam", optimizer_impl="forloop")
    tracker = Tracker()
    with plain_kernels():
        run(JobSpec(mesh=MeshSpec(dp_shard=2), model=model("llama-2-7b"), recipe=recipe), tracker, steps=1, fake=False,
            make=_twenty_layers)  # fmt: skip
    return tracker.recording


def _twenty_layers() -> Workload:
    net = nn.Sequential(*(nn.Linear(2000, 2000) for _ in range(20)))
    target = torch.randn(20, 2000)
    return Workload(net, {"input": torch.randn(20, 2000)}, lambda output: functional.mse_loss(output, target))
