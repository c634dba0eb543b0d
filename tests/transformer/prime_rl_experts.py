"""Modules with the behaviour of prime-rl's own router and experts, in place of those of transformers.

Full training pads each expert's pairs to a multiple of eight, as torchtitan's ``expert_parallel`` does: here no expert needs more
than the rows that it reserves. Beside frozen weights all tokens use the first adapter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.functional import silu, softmax

if TYPE_CHECKING:
    from zeroplan.spec.model import ModelSpec

_ALIGNED = 8


class Experts(nn.Module):
    """Router and experts whose pairs are sorted by expert. ``sigmoid``: GLM's scores, with a bias for the choice."""

    def __init__(self, spec: ModelSpec, *, like: torch.Tensor) -> None:
        super().__init__()
        moe, hidden, adapter = spec.moe, spec.hidden_size, spec.adapter
        assert moe is not None
        at = {"device": like.device, "dtype": like.dtype}
        width, count = moe.moe_intermediate_size, moe.num_experts
        self.sigmoid, self.each, self.count = spec.family == "glm4_moe", moe.num_experts_per_tok, count
        self.gate = nn.Linear(hidden, count, bias=False, **at)
        shapes = {"w1": (width, hidden), "w2": (hidden, width), "w3": (width, hidden)}
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(torch.empty(count, *shape, **at)))
        shared = width * moe.num_shared_experts
        self.shared = nn.ParameterList(
            nn.Parameter(torch.empty(shape, **at)) for shape in ((shared, hidden), (hidden, shared), (shared, hidden)) if shared
        )
        self.bias = torch.zeros(count, dtype=torch.float32, device=like.device)
        self.adapters = nn.ParameterDict()
        self.requires_grad_(requires_grad=adapter is None)
        if adapter is not None and spec.stacked.runs:
            for name, (out, into) in shapes.items():
                for matrix, sizes in (("A", (adapter.rank, into)), ("B", (out, adapter.rank))):
                    for run in range(adapter.runs):
                        self.adapters[f"{name}_{matrix}_{run}"] = nn.Parameter(torch.empty(count, *sizes, **at))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.view(-1, x.shape[-1])
        weights, indices, counts = self._route(flat)
        chosen, tokens, counts = self._sort(weights, indices)
        tokens = tokens.reshape(-1, 1).expand(-1, x.shape[-1])
        pairs = torch.gather(flat, dim=0, index=tokens)
        outputs = self._with_adapters(pairs, counts) if len(self.adapters) else self._trained(pairs, counts)
        outputs = (outputs.to(torch.float32) * chosen.reshape(-1, 1)).to(flat.dtype)
        total = self._shared(flat) if len(self.shared) else torch.zeros_like(flat)
        total = total.scatter_add(dim=0, index=tokens, src=outputs)
        return total.reshape(x.shape)

    def _route(self, flat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        scores = self.gate(flat)
        if self.sigmoid:
            scores = torch.sigmoid(scores.to(torch.float32))
            _, indices = torch.topk(scores + self.bias, k=self.each, dim=1)
            weights = scores.gather(dim=1, index=indices)
        else:
            scores = softmax(scores.to(torch.float32), dim=1)
            weights, indices = torch.topk(scores, k=self.each, dim=1)
        total = weights.sum(dim=-1, keepdim=True) + 1e-20
        weights = weights / total
        weights = weights * 1.5
        return weights, indices, torch.histc(indices.view(-1), bins=self.count, min=0, max=self.count)

    def _sort(self, weights: torch.Tensor, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        counts = torch.histc(indices.view(-1), bins=self.count, min=0, max=self.count)
        order = torch.argsort(indices.view(-1), stable=True)
        chosen = weights.view(-1)[order]
        order = order // self.each
        return chosen, order, counts

    def _shared(self, flat: torch.Tensor) -> torch.Tensor:
        gate, down, up = self.shared
        return torch.matmul(silu(torch.matmul(flat, gate.T)) * torch.matmul(flat, up.T), down.T)

    def _trained(self, pairs: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            places = torch.zeros(pairs.shape[0] + self.count * _ALIGNED, dtype=torch.int32, device=pairs.device)
        pairs = torch.vstack((pairs, pairs.new_zeros(pairs.shape[-1])))
        size = pairs.shape
        pairs = pairs[places, :]
        made = self._products(pairs, counts)
        whole = made.new_empty(size)
        whole[places, :] = made
        return whole[:-1]

    def _products(self, pairs: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        ends = torch.cumsum(counts, dim=0, dtype=torch.int32)
        h = silu(torch._grouped_mm(pairs, self.w1.transpose(-2, -1), offs=ends))
        h = h * torch._grouped_mm(pairs, self.w3.transpose(-2, -1), offs=ends)
        return torch._grouped_mm(h, self.w2.transpose(-2, -1), offs=ends)

    def _with_adapters(self, pairs: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        ends = torch.cumsum(counts, dim=0, dtype=torch.int32)

        def low_rank(given: torch.Tensor, name: str) -> torch.Tensor:
            inner = torch._grouped_mm(given, self.adapters[f"{name}_A_0"].transpose(-2, -1), offs=ends)
            return torch._grouped_mm(inner, self.adapters[f"{name}_B_0"].transpose(-2, -1), offs=ends)

        gate = torch._grouped_mm(pairs, self.w1.transpose(-2, -1), offs=ends)
        beside_gate = low_rank(pairs, "w1")
        h1 = gate + 2.0 * beside_gate
        up = torch._grouped_mm(pairs, self.w3.transpose(-2, -1), offs=ends)
        beside_up = low_rank(pairs, "w3")
        h3 = up + 2.0 * beside_up
        h = silu(h1) * h3
        down = torch._grouped_mm(h, self.w2.transpose(-2, -1), offs=ends)
        beside_down = low_rank(h, "w2")
        return down + 2.0 * beside_down


def with_prime_rl_experts(model: nn.Module, spec: ModelSpec) -> nn.Module:
    """Return the model with these modules in place of those that have experts."""
    for name, module in list(model.named_modules()):
        if name.endswith(".mlp") and hasattr(module, "experts"):
            model.get_submodule(name.rpartition(".")[0]).mlp = Experts(spec, like=module.experts.gate_up_proj)
    return model
