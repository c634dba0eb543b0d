"""Lightning's demo Transformer under DDP, run as on the two pages of Lightning's documentation that print its memory.

The pages are docs/source-fabric and docs/source-pytorch, advanced/model_parallel/fsdp.rst, at
github.com/Lightning-AI/pytorch-lightning; the model is src/lightning/pytorch/demos/transformer.py as of 2.1, with 32 encoder
and 32 decoder layers.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Literal

import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules import transformer
from torch.nn.parallel import DistributedDataParallel

from zeroplan.catalog.model import model
from zeroplan.ledger import Phase
from zeroplan.spec.job import JobSpec
from zeroplan.spec.mesh import MeshSpec
from zeroplan.verify.fake_cuda.fake_tensors import fake_tensors
from zeroplan.verify.replaced import replaced
from zeroplan.verify.training.ddp import reduce_bucket
from zeroplan.verify.training.run import fake_ranks
from zeroplan.verify.watching.tracker import Tracker

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from zeroplan.verify.watching.recording import Recording

WIDTH, LAYERS, VOCAB, BLOCK = 1024, 32, 33278, 35


class Positions(nn.Module):
    """A table of 5,000 positions, which the demo by mistake does not use, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.empty(5000, 1, WIDTH))
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add the positions, throw the sum away as the demo does, and apply dropout."""
        x + self.table[: x.size(0), :]
        return self.dropout(x)


class DemoTransformer(nn.Module):
    """Torch's own encoder and decoder. The decoder reads the targets with a causal mask."""

    def __init__(self) -> None:
        super().__init__()
        self.positions, self.embedding = Positions(), nn.Embedding(VOCAB, WIDTH)
        self.transformer = nn.Transformer(
            d_model=WIDTH, nhead=64, num_encoder_layers=LAYERS, num_decoder_layers=LAYERS, dim_feedforward=4096, dropout=0.2,
            batch_first=True,
        )  # fmt: skip
        self.output = nn.Linear(WIDTH, VOCAB)

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return log-probabilities, one row per token."""
        seen = torch.tril(torch.ones(inputs.shape[1], inputs.shape[1])) == 1
        mask = seen.float().masked_fill(seen == 0, float("-inf")).masked_fill(seen == 1, 0.0)
        source = self.positions(self.embedding(inputs) * WIDTH**0.5)
        target = self.positions(self.embedding(targets) * WIDTH**0.5)
        logits = self.output(self.transformer(source, target, tgt_mask=mask))
        return functional.log_softmax(logits, dim=-1).view(-1, VOCAB)


class EarlierAdam(torch.optim.Optimizer):
    """Torch's foreach Adam until July 2023: the root and the denominator are two lists, each as large as the weights."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, _: object = None) -> None:
        """Update all parameters."""
        weights = self.param_groups[0]["params"]
        if not self.state:
            for weight in weights:
                self.state[weight] = {"exp_avg": torch.zeros_like(weight), "exp_avg_sq": torch.zeros_like(weight)}
        means, squares = ([self.state[weight][name] for weight in weights] for name in ("exp_avg", "exp_avg_sq"))
        gradients = [weight.grad for weight in weights]
        torch._foreach_lerp_(means, gradients, 0.1)
        torch._foreach_mul_(squares, 0.999)
        torch._foreach_addcmul_(squares, gradients, gradients, 0.001)
        roots = torch._foreach_sqrt(squares)
        torch._foreach_div_(roots, [0.5] * len(roots))
        denominators = torch._foreach_add(roots, 1e-8)
        torch._foreach_addcdiv_(weights, means, denominators, [-0.1] * len(weights))


def lightning(program: Literal["Trainer", "Fabric"], *, steps: int = 2) -> Recording:
    """Run the example of one of the two pages, as rank 0 of 2, on fake tensors."""
    loop = _trainer_loop if program == "Trainer" else _fabric_loop
    tracker = Tracker()
    with warnings.catch_warnings(), _ranks(), fake_tensors(tracker), _causal_masks(), tracker:
        warnings.simplefilter("ignore")  # torch copies layers, for which it asks fake tensors for their address
        net = DistributedDataParallel(DemoTransformer())
        net.register_comm_hook(None, reduce_bucket)
        loop(net, tracker, steps)
        tracker.enter(Phase.INIT, steps)
    return tracker.recording


def _ranks() -> AbstractContextManager[object]:
    return fake_ranks(JobSpec(model=model("llama-2-7b"), mesh=MeshSpec(dp_shard=2)), 0, "cpu")


def _causal_masks() -> AbstractContextManager[None]:
    """Replace torch's check of the mask's values, which a fake mask does not have."""
    return replaced(transformer, "_detect_is_causal_mask", lambda mask, *_: mask is not None)


def _trainer_loop(net: nn.Module, tracker: Tracker, steps: int) -> None:
    """Run forward, zero_grad, backward, step. The output is freed when the user's function returns."""
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1, foreach=True)
    for step in range(steps):
        tracker.enter(Phase.FORWARD, step)
        inputs, targets = _batch()
        loss = functional.nll_loss(net(inputs, targets), targets.view(-1))
        optimizer.zero_grad()
        tracker.enter(Phase.BACKWARD, step)
        loss.backward()
        tracker.enter(Phase.STEP, step)
        optimizer.step()


def _fabric_loop(net: nn.Module, tracker: Tracker, steps: int) -> None:
    """Run the page's plain loop, which holds the output all the time. Its Adam is the earlier one."""
    optimizer = EarlierAdam(list(net.parameters()))
    for step in range(steps):
        tracker.enter(Phase.FORWARD, step)
        inputs, targets = _batch()
        output = net(inputs, targets)
        loss = functional.nll_loss(output, targets.view(-1))
        tracker.enter(Phase.BACKWARD, step)
        loss.backward()
        tracker.enter(Phase.STEP, step)
        optimizer.step()
        optimizer.zero_grad()


def _batch() -> tuple[torch.Tensor, torch.Tensor]:
    inputs, targets = (torch.randint(0, VOCAB, (1, BLOCK)) for _ in range(2))
    return inputs, targets
