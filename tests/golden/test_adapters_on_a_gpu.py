"""LoRA of Mistral 7B on one A100 with two releases of transformers, as fms-acceleration measured it."""

import pytest

from zeroplan import estimate, job

# foundation-model-stack/fms-acceleration 876e2ed and 9239802, scripts/benchmarks/refs/a100_80gb.csv, lines 34 and 36: column
# mem_peak_torch_mem_alloc_in_bytes; the requirements frozen beside it name the releases. torch 2.4.1, weights and compute in bf16,
# adapters of rank 16 on the attention's projections, FlashAttention, every block checkpointed, sequences of 4,096 packed tokens.
MEASURED = {
    ("4.48.1", 4): 26_704_571_904,
    ("4.48.1", 8): 38_742_912_512,
    ("4.45.2", 4): 25_653_881_344,
    ("4.45.2", 8): 36_643_613_184,
}


def _estimated(micro_batch: int, release: str | None) -> int:
    said = job(
        model="mistral-7b-v0.1", gpus=1, stage=0, engine="ddp", precision="bf16-mixed", lora_rank=16, lora_targets="attention",
        micro_batch=micro_batch, seq_len=4096, recompute="full", attention="flash", transformers=release, gpu="a100-sxm-80gb",
    )  # fmt: skip
    return int(estimate(said).peak_bytes)


@pytest.mark.parametrize(("release", "micro_batch"), MEASURED)
def test_with_the_release_that_ran_the_estimate_is_what_was_measured(release: str, micro_batch: int):
    measured = MEASURED[release, micro_batch]
    assert _estimated(micro_batch, release) == pytest.approx(measured, rel=1.2e-3)


def test_without_the_release_the_estimate_lacks_the_copy_of_the_logits():
    assert _estimated(8, None) < 0.95 * MEASURED["4.48.1", 8]
