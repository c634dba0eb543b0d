"""Modules with the behaviour of prime-rl's ``MultiLoRALinear``: several adapters beside a frozen linear layer.

Every token belongs to one of the adapters. The tokens of each adapter are consecutive, and here all belong to the first, as in
prime-rl's benchmark and in a batch of one run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from zeroplan.spec.adapter import AdapterSpec


class ManyAdapters(nn.Module):
    """A frozen linear layer with adapters of one rank, whose matrices are stacked in every forward."""

    def __init__(self, base: nn.Linear, adapter: AdapterSpec) -> None:
        super().__init__()
        self.base_layer = base.requires_grad_(requires_grad=False)
        like = {"device": base.weight.device, "dtype": base.weight.dtype}

        def matrices(rows: int, columns: int) -> nn.ParameterList:
            return nn.ParameterList(nn.Parameter(torch.empty(rows, columns, **like)) for _ in range(adapter.runs))

        self.lora_dropout = nn.Dropout(0.1) if adapter.dropout else nn.Identity()
        self.lora_A = matrices(adapter.rank, base.in_features)
        self.lora_B = matrices(base.out_features, adapter.rank)
        self.multiply = _one_by_one if adapter.looped else _in_groups
        self.tokens = torch.zeros(adapter.runs, dtype=torch.int32, device=base.weight.device)
        self.scales = torch.ones(adapter.runs, dtype=torch.bfloat16, device=base.weight.device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.view(-1, x.shape[-1])
        ends = self.tokens.cumsum(0, dtype=torch.int32)
        frozen = self.base_layer(rows)
        given = self.lora_dropout(rows)
        first, second = torch.stack(list(self.lora_A)), torch.stack(list(self.lora_B))
        low_rank = self.multiply(given, first, second, ends)
        per_token = torch.repeat_interleave(self.scales, self.tokens, output_size=rows.shape[0]).unsqueeze(-1)
        return (frozen + per_token * low_rank).view(*x.shape[:-1], frozen.shape[-1])


def _in_groups(given: torch.Tensor, first: torch.Tensor, second: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    inner = torch._grouped_mm(given, first.transpose(-2, -1), ends)
    return torch._grouped_mm(inner, second.transpose(-2, -1), ends)


def _one_by_one(given: torch.Tensor, first: torch.Tensor, second: torch.Tensor, _ends: torch.Tensor) -> torch.Tensor:
    made = []
    for number in range(first.shape[0]):
        start = 0 if number == 0 else given.shape[0]
        inner = torch.matmul(given[start : given.shape[0]], first[number].transpose(-2, -1))
        made.append(torch.matmul(inner, second[number].transpose(-2, -1)))
    return torch.cat(made, dim=0)


def with_many_adapters(model: nn.Module, adapter: AdapterSpec, *, family: str) -> nn.Module:
    """Return the model with these modules in place of the named linear layers; all other weights are frozen."""
    model.requires_grad_(requires_grad=False)
    names = adapter.linear_in(family)
    for name, layer in [one for one in model.named_modules() if isinstance(one[1], nn.Linear)]:
        parent, _, own = name.rpartition(".")
        if own in names:
            setattr(model.get_submodule(parent), own, ManyAdapters(layer, adapter))
    return model.train()
