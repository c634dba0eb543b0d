"""Zeroplan's replacement of apex, where apex is not installed: its norms and its Adam, for scripts that import them."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.dryrun.running import Run, dry_run

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(find_spec("apex") is not None, reason="apex is installed, and needs no double"),
]
pytest.importorskip("torch")

SCRIPT = """
import importlib.util, torch
assert importlib.util.find_spec("apex") is not None
from apex.normalization import FusedLayerNorm, FusedRMSNorm, MixedFusedRMSNorm
from apex.optimizers import FusedAdam
rows, size = 1000, 512
bf16, on = torch.bfloat16, {"device": "cuda"}

def measured(norm, x, autocast=False):
    begin = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with torch.autocast("cuda", bf16, enabled=autocast):
        out = norm(x)
    kept = torch.cuda.memory_allocated() - begin
    gradient = torch.ones_like(out)
    begin = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    torch.autograd.grad(out, [x, *norm.parameters()], gradient)
    return kept, torch.cuda.max_memory_allocated() - begin, out.dtype

x = torch.randn(10, 100, size, dtype=bf16, requires_grad=True, **on)
wide = torch.randn(10, 100, size, requires_grad=True, **on)
print("measured layer", *measured(FusedLayerNorm(size).to(bf16).cuda(), x))
print("measured rms", *measured(FusedRMSNorm(size).to(bf16).cuda(), x))
print("measured small", *measured(FusedRMSNorm(size, memory_efficient=True).to(bf16).cuda(), x))
print("measured plain", *measured(FusedLayerNorm(size, elementwise_affine=False).cuda(), x))
print("measured mixed", *measured(MixedFusedRMSNorm(size).cuda(), x))
print("measured wide", *measured(FusedRMSNorm(size).cuda(), wide))
print("measured autocast", *measured(FusedRMSNorm(size).cuda(), wide, autocast=True))

network = torch.nn.Sequential(torch.nn.Linear(size, size), FusedRMSNorm(size)).cuda().bfloat16()
optimizer = FusedAdam(network.parameters(), lr=1e-4)
begin = torch.cuda.memory_allocated()
for _ in range(3):
    network(x.detach()).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    print("states", sum(one.nbytes for state in optimizer.state.values() for one in state.values()))
"""
ROWS, SIZE = 1000, 512
N, STATISTICS, WEIGHT, PARTS = ROWS * SIZE, 4096, 1024, 4 * 16 * SIZE  # 4,000 bytes of statistics, rounded up to blocks of 512


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("apex")
    (folder / "script.py").write_text(SCRIPT)
    return dry_run("--", "script.py", folder=folder, flags=("--json",))


@pytest.mark.parametrize(
    ("name", "kept", "backward", "dtype"),
    [
        ("layer", 2 * N + 2 * STATISTICS, 2 * N + 2 * WEIGHT + 2 * PARTS, "bfloat16"),
        ("rms", 2 * N + STATISTICS, 2 * N + WEIGHT + PARTS, "bfloat16"),
        ("small", 2 * N + STATISTICS, 2 * N + WEIGHT + PARTS, "bfloat16"),
        ("plain", 2 * N + 2 * STATISTICS, 2 * N, "bfloat16"),
        ("mixed", 4 * N + STATISTICS, 2 * N + 2 * WEIGHT + PARTS, "float32"),
        ("wide", 4 * N + STATISTICS, 4 * N + 2 * WEIGHT + PARTS, "float32"),
    ],
)
def test_a_norm_keeps_its_input_and_a_number_per_row(run: Run, name: str, kept: int, backward: int, dtype: str):
    said = _said(run)[name]
    assert said == [str(kept), str(backward), f"torch.{dtype}"]


def test_under_autocast_a_norm_runs_in_16_bits_and_keeps_the_casts(run: Run):
    kept, _, dtype = _said(run)["autocast"]
    assert dtype == "torch.bfloat16"
    assert int(kept) == 2 * N + 2 * N + WEIGHT + STATISTICS


def test_its_adam_holds_two_states_in_fp32(run: Run):
    states = {line for line in run.errors.splitlines() if line.startswith("states")}
    assert states == {f"states {2 * 4 * (SIZE * SIZE + 2 * SIZE)}"}
    assert {one["what"] for one in run.answer["stood_in"]} == {"apex's norms", "apex's FusedAdam"}


def _said(run: Run) -> dict[str, list[str]]:
    assert run.answer["ended"] == "steps taken"
    lines = [line.split() for line in run.errors.splitlines() if line.startswith("measured")]
    return {name: rest for _, name, *rest in lines}


def test_libraries_do_not_find_apex_and_unsupported_names_end_in_one_line(tmp_path: Path):
    pytest.importorskip("transformers")
    (tmp_path / "script.py").write_text("""
from transformers.models.t5 import modeling_t5
import torch.optim, transformers.utils
assert modeling_t5.T5LayerNorm.__module__ == "transformers.models.t5.modeling_t5"
assert not transformers.utils.is_apex_available()
from apex.optimizers import FusedLAMB
""")
    run = dry_run("--", "script.py", folder=tmp_path)
    assert run.code == 2
    assert "apex.optimizers.FusedLAMB is not supported in a dry run" in run.last_line
