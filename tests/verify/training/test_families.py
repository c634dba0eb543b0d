"""A simulated FSDP2 step of small models, for families that are not in the shipped matrices, is as estimated."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.simulated import simulate
from tests.transformer.tiny_configs import tiny_config
from zeroplan.catalog.config import model_from_config
from zeroplan.comparison import compare_with_estimate
from zeroplan.spec.batch import BatchSpec
from zeroplan.spec.job import JobSpec
from zeroplan.spec.mesh import MeshSpec
from zeroplan.spec.recipe import RecipeSpec, Recompute
from zeroplan.transformer.buffers import buffer_bytes

pytestmark = pytest.mark.torch

CASES = (
    "seed_oss", "smollm3", "hunyuan_v1_dense", "exaone4", "olmoe", "minimax_m2", "qwen3_5_text", "qwen3_5_moe_text", "dots1",
    "glm4_moe, biases, norms of heads", "gemma", "glm", "starcoder2", "cohere", "cohere2", "deepseek_v3", "ministral3",
    "glm4_moe_lite", "qwen2_moe", "granitemoe", "ernie4_5", "granitemoehybrid", "nemotron_h", "nemotron_h, experts", "bamba",
    "gemma4_text", "falcon_h1", "falcon_h1, a norm, biases, tied", "hunyuan_v1_moe", "ernie4_5_moe", "phi", "llama4_text",
    "arcee, biases, tied", "deepseek_v2", "deepseek_v32", "glm_moe_dsa", "mistral4", "solar_open", "cwm", "jais2",
    "helium", "hy_v3", "stablelm, biases, tied", "lfm2", "lfm2_moe", "apertus", "falcon",
    "falcon, several key/value heads, untied", "glm_moe_dsa, picked keys of several layers", "qwen2, a window in some layers",
    "qwen3, a window in all layers", "minimax", "deepseek_v2, groups of experts", "exaone_moe", "kimi_linear",
    "gemma4_text, embeddings of each layer", "gemma4_text, embeddings of each layer, shared keys", "olmo_hybrid",
    "olmo_hybrid, positions, biases, several heads for a key, tied", "internlm3, biases, tied", "youtu",
)  # fmt: skip
BATCH = BatchSpec(micro_batch_size=2, seq_len=64)
#: A recomputed step of GLM-5 is estimated too high by the 16 keys per token that no layer below picked for the first layer. [bytes]
_KEYS = 4 * 16 * BATCH.micro_batch_size * BATCH.seq_len
TOO_HIGH = {("glm_moe_dsa", "full"): _KEYS, ("glm_moe_dsa, picked keys of several layers", "full"): _KEYS}


@pytest.mark.parametrize("case", CASES)
def test_a_recomputed_step_takes_what_is_estimated(case: str) -> None:
    """Except for buffers and the token ids of two batches, which the estimate leaves out of the states."""
    assert_a_step_takes_what_is_said(case, "full")


@pytest.mark.parametrize("case", [*CASES[CASES.index("deepseek_v3") :], "gemma4_text, experts"])
def test_a_step_without_recomputation_takes_what_is_estimated(case: str) -> None:
    assert_a_step_takes_what_is_said(case, "none")


def assert_a_step_takes_what_is_said(case: str, recompute: Recompute) -> None:
    layers = 12 if "shared keys" in case else 6 if "gemma4" in case else 5
    model = model_from_config(tiny_config(case) | {"num_hidden_layers": layers})
    recipe = RecipeSpec(engine="fsdp2", zero_stage=3, precision="bf16-mixed", recompute=recompute)
    found = compare_with_estimate(simulate(JobSpec(model=model, mesh=MeshSpec(dp_shard=4), batch=BATCH, recipe=recipe)))
    left_out = 16 * BATCH.micro_batch_size * BATCH.seq_len + buffer_bytes(model, 4)
    assert 0 <= TOO_HIGH.get((case, recompute), 0) - found.peak.difference <= left_out
    assert 0 <= -found.held.difference <= left_out
