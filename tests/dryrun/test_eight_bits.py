"""Dry runs of bitsandbytes' 8-bit layers: what their products keep and allocate, and models loaded in eight or four bits."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.dryrun.running import dry_run
from tests.dryrun.test_doubles import SAVE

pytestmark = pytest.mark.torch
pytest.importorskip("bitsandbytes")

LAYER = """
import sys, torch, bitsandbytes as bnb
rows, wide, narrow = 1024, 256, 512
layer = bnb.nn.Linear8bitLt(wide, narrow, bias=False, has_fp16_weights=False, threshold=float(sys.argv[1])).cuda()
x = torch.randn(rows, wide, device="cuda", dtype=torch.bfloat16, requires_grad=True)
layer(x).sum().backward()  # the weight becomes the layer's state, and cuBLAS has its workspaces
x.grad = None
begin = torch.cuda.memory_allocated()
torch.cuda.reset_peak_memory_stats()
out = layer(x)
print("forward", torch.cuda.memory_allocated() - begin, torch.cuda.max_memory_allocated() - begin)
gradient = torch.ones_like(out)
begin = torch.cuda.memory_allocated()
torch.cuda.reset_peak_memory_stats()
out.backward(gradient)
print("backward", torch.cuda.max_memory_allocated() - begin)
optimizer = torch.optim.SGD([x])
for _ in range(9):
    layer(x).sum().backward()
    optimizer.step()
"""
ROWS, WIDE, NARROW = 1024, 256, 512
OUT = ROWS * NARROW


def _said(folder: Path, threshold: str) -> dict[str, list[int]]:
    (folder / "layer.py").write_text(LAYER)
    run = dry_run("--", "layer.py", threshold, folder=folder, flags=("--json",))
    assert run.answer["steps"]
    lines = [line.split() for line in run.errors.splitlines() if line.startswith(("forward", "backward"))]
    return {name: [int(one) for one in numbers] for name, *numbers in lines}


def test_a_product_allocates_a_32_bit_and_a_16_bit_copy_of_its_result(tmp_path: Path):
    said = _said(tmp_path, "0")
    scales = 4 * ROWS
    assert said["forward"] == [2 * OUT, (4 + 2 + 2) * OUT + ROWS * WIDE + scales]
    # the weight in 16 bits, and the gradient of the input
    assert said["backward"] == [2 * WIDE * NARROW + 2 * ROWS * WIDE]


def test_columns_beyond_the_threshold_are_kept_and_multiplied_in_16_bits(tmp_path: Path):
    said = _said(tmp_path, "6")
    kept, peak = said["forward"]
    assert kept == 2 * OUT + 2 * ROWS * WIDE
    product = (4 + 2 + 2) * OUT  # the new column numbers replace those that the layer had
    assert peak == product + 2 * ROWS * WIDE + 2 * WIDE * NARROW + ROWS * WIDE + 4 * ROWS


LOADED = """
import sys, torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
eight = BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=float(sys.argv[1]))
model = AutoModelForCausalLM.from_pretrained("tiny", quantization_config=eight, device_map={"": 0}, dtype=torch.bfloat16)
weights = [one for one in model.model.layers.parameters() if one.dim() > 1]
assert {one.dtype for one in weights} == {torch.int8}
print("held", torch.cuda.memory_allocated(), sum(one.numel() for one in weights))
model = get_peft_model(model, LoraConfig(target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad])
tokens = torch.zeros(2, 64, dtype=torch.int64, device="cuda")
for _ in range(4):
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_model_loaded_in_eight_bits_trains_adapters(tmp_path: Path):
    pytest.importorskip("peft")
    subprocess.run([sys.executable, "-c", SAVE], cwd=tmp_path, check=True, capture_output=True)
    (tmp_path / "loaded.py").write_text(LOADED)
    peaks = []
    for threshold in ("0", "6"):
        run = dry_run("--", "loaded.py", threshold, folder=tmp_path, flags=("--json",))
        held, numbers = next(map(int, line.split()[1:]) for line in run.errors.splitlines() if line.startswith("held"))
        whole = 2 * 2 * 4096 * 256  # embedding and head, in 16 bits
        assert held == pytest.approx(whole + numbers, rel=0.01)
        replaced = {one["what"] for one in run.answer["stood_in"]}
        assert ("values beyond the threshold of 8-bit layers" in replaced) == (threshold == "6")
        assert "bitsandbytes' kernels" in replaced
        peaks.append(run.peak_bytes)
    assert peaks[0] < peaks[1]


FOUR = """
import torch, bitsandbytes as bnb
from accelerate import init_empty_weights
with init_empty_weights():
    layer = bnb.nn.Linear4bit(64, 32, bias=False)
kept = vars(layer.weight)
weight = bnb.nn.Params4bit(torch.randn(32, 64), requires_grad=False, **kept).to("cuda")
state, out = weight.quant_state, torch.empty(32, 64, device="cuda", dtype=torch.bfloat16)
bnb.functional.lib.cdequantize_blockwise_bf16_nf4(
    None, bnb.functional.get_ptr(weight), bnb.functional.get_ptr(state.absmax), bnb.functional.get_ptr(out), 64, out.numel()
)
parameter = torch.nn.Parameter(torch.ones(64, 8, device="cuda", dtype=torch.bfloat16))
optimizer = torch.optim.SGD([parameter])
for _ in range(3):
    (out @ parameter).sum().backward()
    optimizer.step()
"""


def test_layers_that_call_the_cuda_library_directly_run(tmp_path: Path):
    """Unsloth's layers do so. Transformers 4.45 makes a four-bit weight from the attributes of an empty one."""
    pytest.importorskip("accelerate")
    (tmp_path / "script.py").write_text(FOUR)
    answer = dry_run("--", "script.py", folder=tmp_path).answer
    assert "bitsandbytes' library for CUDA" in {one["what"] for one in answer["stood_in"]}
