"""A small transformer of no known family, as a workload for ``zeroplan verify`` and ``zeroplan profile``.

Blocks with attention beside a convolution, a gate and a squared ReLU alternate with blocks without attention.
"""

import torch
from torch import nn
from torch.nn import functional

VOCABULARY, WIDTH, HEADS, LAYERS = 480, 96, 4, 4


class Mixer(nn.Module):
    """Attention and a depthwise convolution of the same normed input, added through a gate; then a squared-ReLU MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.second = nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.along = nn.Conv1d(WIDTH, WIDTH, 3, padding=2, groups=WIDTH)
        self.gate = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 5 * WIDTH // 2), nn.Linear(5 * WIDTH // 2, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        normed = self.norm(hidden)
        q, k, v = (one.unflatten(-1, (HEADS, -1)).transpose(1, 2) for one in self.qkv(normed).chunk(3, -1))
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        convolved = self.along(normed.transpose(1, 2))[..., : hidden.size(1)].transpose(1, 2)
        mixed = self.out(attended) + torch.sigmoid(self.gate(normed)) * convolved
        hidden = hidden + mixed
        return hidden + self.down(functional.relu(self.up(self.second(hidden))).square())


class Gated(nn.Module):
    """A block without attention: two projections, one through tanh."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, bias=False)
        self.left, self.right, self.back = nn.Linear(WIDTH, 200), nn.Linear(WIDTH, 200), nn.Linear(200, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        normed = self.norm(hidden)
        return hidden + self.back(torch.tanh(self.left(normed)) * self.right(normed))


class OddTransformer(nn.Module):
    """Embeddings with learned positions, a norm of them, the blocks, a head of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(8192, WIDTH)
        self.enter = nn.LayerNorm(WIDTH)
        self.blocks = nn.ModuleList(Gated() if at % 3 == 2 else Mixer() for at in range(LAYERS))
        self.leave, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        places = torch.arange(ids.size(1), device=ids.device)
        hidden = self.enter(self.tokens(ids) + self.positions(places))
        for block in self.blocks:
            hidden = block(hidden)
        return functional.cross_entropy(self.head(self.leave(hidden)).flatten(0, 1).float(), ids.flatten())


def workload(micro_batch: int, seq_len: int) -> tuple[nn.Module, dict[str, torch.Tensor], object]:
    """The module, a batch of this size, and the loss, which is the module's output."""
    return OddTransformer(), {"ids": torch.zeros(micro_batch, seq_len, dtype=torch.int64)}, lambda loss: loss


class Attending(nn.Module):
    """``nn.MultiheadAttention``, which uses its output projection's weight without calling the module; then an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.mlp = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        normed = self.norm(hidden)
        hidden = hidden + self.attention(normed, normed, normed, need_weights=False)[0]
        return hidden + self.mlp(hidden)


def attending(micro_batch: int, seq_len: int) -> tuple[nn.Module, dict[str, torch.Tensor], object]:
    """The odd transformer with ``Attending`` blocks."""
    module, batch, loss = workload(micro_batch, seq_len)
    module.blocks = nn.ModuleList(Attending() for _ in range(LAYERS))
    return module, batch, loss


def fixed() -> tuple[nn.Module, dict[str, torch.Tensor], object]:
    """The odd transformer with a batch of its own, which zeroplan resizes."""
    return workload(2, 64)


def raising() -> None:
    """A workload that raises an error."""
    raise RuntimeError("no data today")


def without_blocks() -> tuple[nn.Module, dict[str, torch.Tensor], object]:
    """A module without a list of blocks."""
    return nn.Linear(8, 1), {"input": torch.zeros(2, 8)}, torch.Tensor.sum


class Judge(nn.Module):
    """An encoder-decoder of at most 512 tokens, with truncated-normal weights, and a head of two classes.

    The head's bias has two names, as in BERT.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(512, WIDTH)
        self.encoder, self.decoder = (nn.ModuleList(Gated() for _ in range(count)) for count in (3, 2))
        self.head = nn.Linear(WIDTH, 2)
        self.bias = self.head.bias
        for parameter in self.parameters():
            nn.init.trunc_normal_(parameter, std=0.02)

    def forward(self, ids: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        hidden = self.tokens(ids) + self.positions.weight[: ids.size(1)].expand(*ids.shape, -1)
        for block in (*self.encoder, *self.decoder):
            hidden = block(hidden)
        return functional.cross_entropy(self.head(hidden[:, 0]).float(), classes)


def judging(micro_batch: int, seq_len: int) -> tuple[nn.Module, dict[str, torch.Tensor], object]:
    """A batch of sequences, each of one class."""
    ids = torch.zeros(micro_batch, seq_len, dtype=torch.int64)
    return Judge(), {"ids": ids, "classes": torch.zeros(micro_batch, dtype=torch.int64)}, lambda loss: loss


def reading(micro_batch: int, seq_len: int) -> tuple[nn.Module, dict[str, torch.Tensor], object]:
    """A workload that reads the loss, which fake tensors cannot give."""
    module, batch, _ = workload(micro_batch, seq_len)
    return module, batch, lambda loss: loss * loss.item()
