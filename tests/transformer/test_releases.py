"""Older releases of transformers: what they run, as their own modules took it."""

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


def _peak(
    folder: Path, release: str, batch: tuple[int, int], shape: tuple[int, int, int], recompute: str, precision: str
) -> int:
    heads, vocabulary, width = shape
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 512, "intermediate_size": width,
        "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": heads, "vocab_size": vocabulary,
        "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "hidden_act": "silu",
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
    """But for what is kept of the random state, 8 or 16 KiB for each checkpoint."""
    ran = RUN[release, batch, shape, recompute, precision]
    said = _peak(tmp_path, release, batch, shape, recompute, precision)
    assert 0 <= ran - said <= (4 * 16 * 1024 if recompute == "full" else 1024)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"transformers": "4.38"}, "transformers='4.38' is not modelled; use a release from 4.39 to 5.23"),
        ({"transformers": "new"}, "transformers='new' is not a release; write 4.48"),
        ({"transformers": "4.55"}, "with attention 'sdpa', to which it gives a mask"),
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
