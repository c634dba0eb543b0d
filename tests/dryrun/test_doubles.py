"""Replacements of what cannot run without a GPU: flash-attn, bitsandbytes, and text generation of unknown length."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.dryrun.running import SCRIPTS, dry_run
from zeroplan.estimator import estimate
from zeroplan.ledger import Kind
from zeroplan.spec.batch import BatchSpec
from zeroplan.spec.job import JobSpec
from zeroplan.spec.model import ModelSpec
from zeroplan.spec.recipe import RecipeSpec

pytestmark = pytest.mark.torch
pytest.importorskip("transformers")

SIZES = {
    "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4,
    "vocab_size": 4096, "tie_word_embeddings": False,
}  # fmt: skip
SAVE = f"""
import torch
from transformers import LlamaConfig, LlamaForCausalLM
LlamaForCausalLM(LlamaConfig(**{SIZES!r})).to(torch.bfloat16).save_pretrained("tiny")
"""

ASKS = """
from importlib.metadata import packages_distributions, version
import flash_attn, torch
assert version("flash_attn") == version("flash-attn") == flash_attn.__version__
assert packages_distributions()["flash_attn"] == ["flash-attn"]
from flash_attn.layers.rotary import apply_rotary_emb
queries = torch.ones(2, 64, 4, 32, device="cuda", requires_grad=True)
table = torch.ones(64, 16, device="cuda")
begin = torch.cuda.memory_allocated()
rotated = apply_rotary_emb(queries, table, table)
assert torch.cuda.memory_allocated() - begin == queries.nbytes
rotated.sum().backward()
assert queries.grad.shape == apply_rotary_emb(queries, table, table, inplace=True).shape == queries.shape
layer = torch.nn.Linear(8, 8, device="cuda")
optimizer = torch.optim.SGD(layer.parameters())
for _ in range(3):
    layer(torch.ones(8, 8, device="cuda")).sum().backward()
    optimizer.step()
"""


@pytest.mark.skipif(find_spec("flash_attn") is not None, reason="flash-attn is installed, and needs no double")
def test_flash_attn_needs_as_much_memory_as_torchs_attention(tmp_path: Path):
    """Both run the same kernels: the peaks agree within 64 bytes, which are for the script's own loss."""
    flash = dry_run("--", str(SCRIPTS / "flash.py"), "flash_attention_2", folder=tmp_path)
    own = dry_run("--", str(SCRIPTS / "flash.py"), "sdpa", folder=tmp_path)
    assert flash.peak_bytes == pytest.approx(own.peak_bytes, abs=64)
    replaced = {one["what"]: one["count"] for one in flash.answer["stood_in"]}
    assert replaced == {"flash-attn": (2 + 2) * 2}
    assert own.answer["stood_in"] == []


@pytest.mark.skipif(find_spec("flash_attn") is not None, reason="flash-attn is installed, and needs no double")
def test_flash_attn_with_padding_takes_what_is_estimated(tmp_path: Path):
    """The estimate counts the padding as tokens: here one of 512."""
    run = dry_run("--", str(SCRIPTS / "padded_flash.py"), folder=tmp_path)
    model = ModelSpec(
        family="llama", hidden_size=512, intermediate_size=1536, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=4, head_dim=64, vocab_size=128,
    )  # fmt: skip
    recipe = RecipeSpec(
        engine="ddp", zero_stage=0, precision="bf16", optimizer_impl="fused", attention="flash", padded=True
    )  # fmt: skip
    answer = estimate(JobSpec(model=model, recipe=recipe, batch=BatchSpec(micro_batch_size=4, seq_len=512)))
    estimated = sum(int(line.n_bytes) for line in answer.peak.lines if line.kind is not Kind.WORKSPACE)
    assert 1 <= estimated / run.peak_bytes < 1.002


@pytest.mark.skipif(find_spec("flash_attn") is not None, reason="flash-attn is installed, and needs no double")
def test_libraries_find_the_flash_attn_package_and_its_rotary_embedding(tmp_path: Path):
    """Transformers 4.48 reads its version, 4.53 imports its rotary embedding, and 5.6 looks up its distribution."""
    (tmp_path / "script.py").write_text(ASKS)
    assert dry_run("--", "script.py", folder=tmp_path).answer["ended"] == "steps taken"


def test_qlora_has_the_memory_that_verify_measures(tmp_path: Path):
    pytest.importorskip("bitsandbytes")
    pytest.importorskip("peft")
    from tests.simulated import simulate
    from zeroplan.resolve import job
    from zeroplan.spec.model import ModelSpec

    subprocess.run([sys.executable, "-c", SAVE], cwd=tmp_path, check=True, capture_output=True)
    run = dry_run("--", str(SCRIPTS / "qlora.py"), "tiny", folder=tmp_path)
    model = ModelSpec(family="llama", head_dim=32, **SIZES)
    oracle = simulate(
        job(model=model, gpus=1, lora_rank=8, quantize="nf4-double", micro_batch=2, seq_len=256, optimizer_impl="fused",
            gpu="h100-sxm-80gb")
    ).steady  # fmt: skip
    assert run.peak_bytes == pytest.approx(oracle.peak.peak_bytes, abs=64)
    assert run.answer["steps"][-1]["held_bytes"] == pytest.approx(oracle.held_bytes, abs=64)
    assert {"safetensors files", "bitsandbytes' kernels"} == {one["what"] for one in run.answer["stood_in"]}


@pytest.mark.parametrize("optimizer", ["AdamW8bit", "PagedAdamW8bit"])
def test_bitsandbytes_optimizers_hold_their_states(tmp_path: Path, optimizer: str):
    """The states are two bytes per parameter, and two scales per block of 256. Paged states are outside torch's allocator."""
    pytest.importorskip("bitsandbytes")
    run = dry_run("--", str(SCRIPTS / "eight_bits.py"), optimizer, folder=tmp_path)
    matrices = 2 * 1024 * 4096
    scales, states = 2 * 4 * matrices // 256, 0 if optimizer.startswith("Paged") else 2 * matrices
    held = run.answer["steps"][-1]["held_kinds"]
    assert held["optimizer state"] == pytest.approx(scales + states, abs=2**16)
    assert held["parameters"] == 2 * (matrices + 4096 + 1024)
    named = {one["what"] for one in run.answer["stood_in"]}
    assert named == ({"bitsandbytes' paged optimizer states"} if optimizer.startswith("Paged") else set())
    assert not run.answer["made_up"]


GENERATES = f"""
import torch
from transformers import LlamaConfig, LlamaForCausalLM
model = LlamaForCausalLM(LlamaConfig(**{SIZES!r})).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    tokens = torch.randint(0, 4096, (2, 8), device="cuda")
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    written = model.eval().generate(tokens, max_new_tokens=1000)
    print("took", written.shape[1], torch.cuda.max_memory_allocated() - before)
    model.train()(input_ids=written, labels=written).loss.backward()
    optimizer.step()
"""


def test_generation_has_its_maximal_length_and_its_cache_is_counted(tmp_path: Path):
    """The cache has the keys and values of two layers. When the last token is appended, one layer has a copy.

    Repeating keys and values for twice as many query heads takes two layers' size more.
    """
    (tmp_path / "script.py").write_text(GENERATES)
    run = dry_run("--", "script.py", folder=tmp_path, flags=("--json",))
    assert "generation of text" in {one["what"] for one in run.answer["stood_in"]}
    _, second = [line.split()[1:] for line in run.errors.splitlines() if line.startswith("took")][:2]
    length, took = second  # the first also allocates cuBLAS's workspace
    layer = 2 * 2 * 1007 * 4 * 32 * 4
    assert int(length) == 1008
    assert int(took) == pytest.approx((2 + 1 + 2) * layer, rel=0.02)
