"""Zeroplan's replacement of Transformer Engine, where it is not installed: linear layers and norms, without FP8."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.dryrun.running import Run, dry_run

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(find_spec("transformer_engine") is not None, reason="it is installed, and needs no double"),
]
pytest.importorskip("torch")

SCRIPT = """
import torch
import transformer_engine.pytorch as te
rows, wide, narrow = 1024, 512, 256
bf16, on = torch.bfloat16, {"device": "cuda"}

def measured(name, layer, x, autocast=False):
    for _ in range(2):  # the first has workspaces for products
        begin = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        with torch.autocast("cuda", bf16, enabled=autocast):
            out = layer(x)
        kept = torch.cuda.memory_allocated() - begin
        gradient = torch.ones_like(out)
        begin = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        out.backward(gradient)
        peak = torch.cuda.max_memory_allocated() - begin
        del out, gradient
        x.grad = None
        layer.zero_grad()
    print("measured", name, kept, peak)

torch.randn(8, 8, **on) @ torch.randn(8, 8, **on)
begin = torch.cuda.memory_allocated()
x = torch.randn(rows, wide, dtype=bf16, requires_grad=True, **on)
with te.fp8_autocast(enabled=False):
    te.Linear(wide, narrow, params_dtype=bf16)(x)
print("measured workspace", torch.cuda.memory_allocated() - begin - x.nbytes)
fp32 = torch.randn(rows, wide, requires_grad=True, **on)
measured("linear", te.Linear(wide, narrow, bias=False, params_dtype=bf16), x)
measured("bias", te.Linear(wide, narrow, params_dtype=bf16), x)
measured("autocast", te.Linear(wide, narrow, bias=False), fp32, autocast=True)
frozen = te.Linear(wide, narrow, bias=False, params_dtype=bf16).requires_grad_(False)
measured("frozen", frozen, x)
measured("rms", te.RMSNorm(wide, dtype=bf16), x)
measured("layer", te.LayerNorm(wide, dtype=bf16), x)
measured("both", te.LayerNormLinear(wide, narrow, bias=False, normalization="RMSNorm", params_dtype=bf16), x)
out, normed = te.LayerNormLinear(wide, narrow, params_dtype=bf16, return_layernorm_output=True)(x)
assert (out.shape, normed.shape) == ((rows, narrow), (rows, wide))
(out.sum() + normed.sum()).backward()
network = torch.nn.Sequential(te.LayerNormLinear(wide, narrow), te.Linear(narrow, wide), te.RMSNorm(wide))
assert {one.device.type for one in network.parameters()} == {"cuda"}
names = {"0.weight", "0.bias", "0.layer_norm_weight", "0.layer_norm_bias", "1.weight", "1.bias", "2.weight"}
assert set(network.state_dict()) == names
optimizer = torch.optim.AdamW(network.parameters())
for _ in range(3):
    with torch.autocast("cuda", bf16):
        loss = network(fp32.detach()).sum()
    loss.backward()
    optimizer.step()
"""
ROWS, WIDE, NARROW = 1024, 512, 256
IN, OUT, WEIGHT = 2 * ROWS * WIDE, 2 * ROWS * NARROW, 2 * WIDE * NARROW
STATISTICS, SCALE, SUMS = 4 * ROWS, 2 * WIDE, 4 * 132 * WIDE


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("engine")
    (folder / "script.py").write_text(SCRIPT)
    return dry_run("--gpu", "h100-sxm-80gb", "--", "script.py", folder=folder, flags=("--json",))


@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        ("workspace", [(32 << 20) + 1024]),
        ("linear", [OUT, IN + WEIGHT]),  # input and weight belong to the script
        ("bias", [OUT, IN + WEIGHT + 2 * NARROW]),
        ("frozen", [OUT, IN]),
        ("rms", [IN + STATISTICS, IN + SCALE + SUMS]),
        ("layer", [IN + 2 * STATISTICS, IN + 2 * SCALE + 2 * SUMS]),
    ],
)
def test_a_layer_keeps_and_allocates_what_transformer_engine_does(run: Run, name: str, numbers: list[int]):
    assert _said(run)[name] == numbers


def test_under_autocast_input_and_weight_are_cast_and_kept(run: Run):
    kept, _ = _said(run)["autocast"]
    assert kept == IN + WEIGHT + OUT


def test_layernorm_linear_keeps_the_normed_input_until_the_weight_has_its_gradient(run: Run):
    kept, peak = _said(run)["both"]
    assert kept == IN + STATISTICS + OUT
    flowing, of_input, gone = IN, IN, IN
    assert peak == WEIGHT + flowing + of_input - gone + SCALE + SUMS


def test_the_answer_names_the_replaced_layers(run: Run):
    assert run.answer["ended"] == "steps taken"
    assert {one["what"] for one in run.answer["stood_in"]} == {"Transformer Engine's layers"}


def _said(run: Run) -> dict[str, list[int]]:
    assert run.code == 0, run.errors
    lines = [line.split() for line in run.errors.splitlines() if line.startswith("measured")]
    return {name: [int(one) for one in numbers] for _, name, *numbers in lines}


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("te.fp8_autocast(enabled=True)", "FP8 (autocast, fp8_autocast) is not supported in a dry run"),
        ("te.Linear(8, 8, tp_size=2)", "tensor parallelism is not supported in a dry run"),
        ("te.TransformerLayer", "transformer_engine.pytorch.TransformerLayer is not supported in a dry run"),
    ],
)
def test_unsupported_names_end_in_one_line(tmp_path: Path, code: str, says: str):
    (tmp_path / "script.py").write_text(f"import transformer_engine.pytorch as te\n{code}\n")
    run = dry_run("--", "script.py", folder=tmp_path)
    assert run.code == 2
    assert says in run.last_line
