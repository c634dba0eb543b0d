"""Compares older releases of transformers with records of their own modules."""

import json
from pathlib import Path

import pytest

from zeroplan import SpecError, estimate, job
from zeroplan.ledger import Kind, total_bytes

# A Llama of two blocks, 512 wide, run by `zeroplan dryrun` with each release installed (torch 2.13): the peak of its steps without
# cuBLAS's workspaces. Keys: release, sequences and tokens of each, key/value heads (of 8), vocabulary and MLP width, recomputation,
# precision.
RUN = {
    ("4.48.1", (2, 1024), (2, 8000, 1408), "none", "bf16"): 421_750_956,
    ("4.48.1", (2, 2048), (8, 500, 1408), "none", "bf16"): 294_678_712,
    ("4.48.1", (2, 2048), (1, 500, 256), "none", "bf16"): 192_442_552,
    ("4.48.1", (2, 2048), (2, 100, 256), "full", "bf16"): 115_487_904,
    ("4.48.1", (1, 4096), (8, 100, 256), "full", "bf16"): 120_747_168,
    ("4.48.1", (2, 1024), (2, 100, 256), "full", "fp32"): 90_706_072,
    ("4.48.1", (2, 1024), (8, 4000, 256), "none", "fp32"): 296_001_180,
    ("4.48.1", (1, 1024), (2, 8000, 256), "none", "fp32"): 278_950_312,
    ("4.45.2", (2, 1024), (2, 8000, 1408), "none", "bf16"): 384_788_908,
    ("4.45.2", (2, 2048), (8, 500, 1408), "none", "bf16"): 286_290_360,
    ("4.45.2", (2, 2048), (1, 500, 256), "none", "bf16"): 169_374_136,
    ("4.45.2", (2, 2048), (2, 100, 256), "full", "bf16"): 111_293_856,
    ("4.45.2", (1, 4096), (8, 100, 256), "full", "bf16"): 116_553_120,
    ("4.45.2", (2, 1024), (2, 100, 256), "full", "fp32"): 90_706_328,
    ("4.45.2", (2, 1024), (8, 4000, 256), "none", "fp32"): 296_001_436,
    ("4.45.2", (1, 1024), (2, 8000, 256), "none", "fp32"): 278_950_568,
}
# The same of releases that make a mask for every layer. They get no attention mask and keep no cache. The last key: the model's
# family. The Mistrals have a window of 512 tokens.
MASKED = {
    ("4.55.0", (2, 1024), (2, 100, 256), "none", "bf16", "llama"): 106_033_320,
    ("4.57.3", (2, 1024), (2, 100, 256), "none", "bf16", "llama"): 106_033_320,
    ("4.55.0", (2, 1000), (1, 500, 256), "none", "bf16", "llama"): 105_816_104,
    ("4.57.3", (2, 1000), (1, 500, 256), "none", "bf16", "llama"): 98_648_104,
    ("4.55.0", (1, 2048), (8, 500, 1408), "none", "bf16", "llama"): 181_252_264,
    ("4.55.0", (2, 1024), (2, 100, 256), "full", "bf16", "llama"): 68_992_152,
    ("4.57.3", (2, 1024), (2, 100, 256), "full", "bf16", "llama"): 68_992_152,
    ("4.55.0", (2, 1024), (2, 100, 256), "none", "fp32", "llama"): 169_943_208,
    ("4.57.3", (2, 1024), (8, 100, 256), "full", "fp32", "llama"): 112_201_880,
    ("4.55.0", (2, 1024), (2, 100, 256), "none", "bf16", "mistral"): 106_033_320,
    ("4.57.3", (2, 1024), (2, 100, 256), "none", "bf16", "mistral"): 106_033_320,
    ("4.55.0", (2, 1024), (2, 100, 256), "none", "bf16", "qwen2"): 106_042_536,
    ("4.57.3", (3, 500), (4, 8000, 256), "full", "bf16", "qwen2"): 217_451_560,
    ("4.54.1", (3, 500), (2, 8000, 256), "none", "bf16", "llama"): 258_242_744,
    ("4.56.2", (3, 500), (2, 8000, 256), "none", "bf16", "llama"): 258_242_744,
    ("4.55.0", (3, 500), (1, 100, 256), "full", "fp32", "llama"): 76_683_176,
}


def _peak(
    folder: Path, release: str, batch: tuple[int, int], shape: tuple[int, int, int], recompute: str, precision: str,
    family: str = "llama",
) -> int:  # fmt: skip
    heads, vocabulary, width = shape
    config = {
        "architectures": [f"{family.capitalize()}ForCausalLM"], "model_type": family, "hidden_size": 512,
        "intermediate_size": width, "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": heads,
        "vocab_size": vocabulary,
        "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "hidden_act": "silu",
        **({"sliding_window": 512} if family == "mistral" else {}),
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    answer = estimate(
        job(config=str(folder), gpus=1, stage=0, engine="ddp", precision=precision, micro_batch=batch[0], seq_len=batch[1],
            recompute=recompute, transformers=release, reentrant=False)
    )  # fmt: skip
    return max(int(total_bytes(line for line in moment.lines if line.kind is not Kind.WORKSPACE)) for moment in answer.moments)


@pytest.mark.parametrize(("release", "batch", "shape", "recompute", "precision"), RUN)
def test_the_peak_is_that_of_its_own_modules(
    tmp_path: Path, release: str, batch: tuple[int, int], shape: tuple[int, int, int], recompute: str, precision: str
):
    """Except for the saved random state, 8 or 16 KiB for each checkpoint."""
    ran = RUN[release, batch, shape, recompute, precision]
    said = _peak(tmp_path, release, batch, shape, recompute, precision)
    assert 0 <= ran - said <= (4 * 16 * 1024 if recompute == "full" else 1024)


@pytest.mark.parametrize(("release", "batch", "shape", "recompute", "precision", "family"), MASKED)
def test_the_peak_with_a_mask_is_that_of_its_own_modules(
    tmp_path: Path,
    release: str,
    batch: tuple[int, int],
    shape: tuple[int, int, int],
    recompute: str,
    precision: str,
    family: str,
):
    ran = MASKED[release, batch, shape, recompute, precision, family]
    said = _peak(tmp_path, release, batch, shape, recompute, precision, family)
    assert 0 <= ran - said <= (16 * 1024 if recompute == "full" else 1024)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"transformers": "4.38"}, "transformers='4.38' is not modelled; use a release from 4.39 to 5.24"),
        ({"transformers": "new"}, "transformers='new' is not a release; write 4.48"),
        ({"transformers": "4.53", "model": "mistral-7b-v0.1"}, "with a sliding window"),
        ({"transformers": "4.48", "model": "gpt2"}, "with a gpt2 model"),
        ({"transformers": "4.48", "tensor_parallel": 2}, "with tp=2"),
        ({"transformers": "4.48", "loss": "chunked"}, "with loss 'chunked'"),
        ({"transformers": "4.48", "modules": "torchtitan"}, "with modules of torchtitan"),
        ({"transformers": "4.48", "engine": "megatron"}, "with engine 'megatron'"),
    ],
)
def test_what_is_not_modelled_is_refused(said: dict[str, str], message: str):
    with pytest.raises(SpecError, match=message.replace("(", r"\(")):
        job(**{"model": "llama-3.1-8b", "gpus": 8, **said})


def test_releases_that_hold_the_same_answer_alike():
    newest, named = (estimate(job(model="llama-3.1-8b", gpus=8, transformers=one)) for one in (None, "5.0"))
    assert newest.peak_bytes == named.peak_bytes


@pytest.mark.parametrize("family", ["deepseek-v3", "glm-4.5-air", "nemotron-3-nano-30b-a3b"])
def test_since_5_24_routers_stay_in_fp32_which_the_engine_must_allow(family: str):
    """``_keep_in_fp32_modules_strict`` names the routers' weights since 5.24.0; FSDP2 refuses trained weights of two dtypes."""
    recipes = [
        {"precision": precision, "engine": engine} for precision in ("bf16", "bf16-mixed") for engine in ("ddp", "fsdp2")
    ]
    for recipe in (*recipes, {"precision": "bf16", "engine": "deepspeed", "stage": 3}):
        before = estimate(job(model=family, gpus=64, transformers="5.23", **recipe))
        if recipe["precision"] == "bf16" and recipe["engine"] != "deepspeed":
            with pytest.raises(
                SpecError, match="its routers stay in fp32; use 'bf16-mixed', or engine 'deepspeed', or a release before"
            ):
                job(model=family, gpus=64, transformers="5.24", **recipe)
        else:
            assert estimate(job(model=family, gpus=64, transformers="5.24", **recipe)).peak_bytes == before.peak_bytes


def test_a_model_without_experts_has_no_router():
    said = {"model": "nemotron-nano-9b-v2", "gpus": 8, "precision": "bf16"}
    assert estimate(job(**said, transformers="5.24")).peak_bytes == estimate(job(**said)).peak_bytes
