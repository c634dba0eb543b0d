"""Master copies of weights are optimizer state, however a script keeps them; weights outside a module are parameters."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dryrun.running import dry_run

pytestmark = pytest.mark.torch
pytest.importorskip("torch")

SCRIPT = """
import torch
from torch import nn

first, second, third = (nn.Linear(64, 64, bias=False, device="cuda", dtype=torch.bfloat16) for _ in range(3))
outside = nn.Parameter(torch.ones(64, 64, device="cuda"))

masters = [nn.Parameter(first.weight.detach().float().clone())]      # parameters that autograd never sees
flat = torch.cat([second.weight.detach().float().view(-1)])          # a view of a flat buffer
class KeepsMasters(torch.optim.SGD):                                 # an optimizer that keeps them itself
    def __init__(self, parameters):
        super().__init__(parameters, lr=0.1)
        self.masters = {"fp32": [one.detach().float().clone() for group in self.param_groups for one in group["params"]]}

optimizers = [
    torch.optim.SGD([*masters, flat.view(64, 64), outside], lr=0.1), KeepsMasters(third.parameters()),
]
for step in range(4):
    batch = torch.ones(4, 64, device="cuda", dtype=torch.bfloat16)
    (third(second(first(batch))).float() @ outside).sum().backward()
    masters[0].grad = first.weight.grad.float()
    optimizers[0].param_groups[0]["params"][1].grad = second.weight.grad.float()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    first.zero_grad(), second.zero_grad()
    first.weight.data.copy_(masters[0].data)
"""


def test_master_copies_are_optimizer_state(tmp_path: Path):
    (tmp_path / "script.py").write_text(SCRIPT)
    held = dry_run("--", "script.py", folder=tmp_path).answer["steps"][-1]["held_kinds"]
    weights = 64 * 64
    assert held["optimizer state"] == 3 * 4 * weights
    assert held["parameters"] == 3 * 2 * weights + 4 * weights
    assert "temporaries" not in held
