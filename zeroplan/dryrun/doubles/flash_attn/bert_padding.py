"""Removes padding from sequences and restores it: shapes and kept tensors as in flash-attn 2.8, ``bert_padding.py``."""

import torch
from torch import nn


def index_first_axis(x: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """The rows of a tensor at the indices."""
    return x.index_select(0, indices)


def index_put_first_axis(values: torch.Tensor, indices: torch.Tensor, first_axis_dim: int) -> torch.Tensor:
    """A tensor of zeros with the values in the rows at the indices."""
    out = values.new_zeros((first_axis_dim, *values.shape[1:]))
    out[indices] = values
    return out


def unpad_input(
    hidden_states: torch.Tensor, attention_mask: torch.Tensor, unused_mask: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, torch.Tensor]:  # fmt: skip
    """The unmasked tokens, their indices, the sequences' offsets, the longest length, and the lengths."""
    every = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = every.sum(dim=-1, dtype=torch.int32)
    indices = torch.nonzero(every.flatten(), as_tuple=False).flatten()
    starts = nn.functional.pad(torch.cumsum(lengths, dim=0, dtype=torch.int32), (1, 0))
    left = index_first_axis(hidden_states.flatten(0, 1), indices)
    return left, indices, starts, int(lengths.max().item()), attention_mask.sum(dim=-1, dtype=torch.int32)


def pad_input(hidden_states: torch.Tensor, indices: torch.Tensor, batch: int, seqlen: int) -> torch.Tensor:
    """The tokens at their indices among zeros, with shape batch, sequence, and the rest."""
    return index_put_first_axis(hidden_states, indices, batch * seqlen).view(batch, seqlen, *hidden_states.shape[1:])
