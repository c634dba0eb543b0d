"""Selective recomputation, kept fp32 logits, a loss in chunks or pieces: simulated runs against the estimate."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.simulated import on_the_fake_gpu, simulate
from tests.transformer.tiny_configs import tiny_config
from tests.verify.watching.test_tracker import WEIGHTS, job
from zeroplan.catalog.config import model_from_config
from zeroplan.comparison import compare_with_estimate
from zeroplan.errors import MeasurementError
from zeroplan.estimator import estimate
from zeroplan.ledger import Kind, Phase
from zeroplan.spec.batch import BatchSpec
from zeroplan.spec.job import JobSpec
from zeroplan.spec.mesh import MeshSpec
from zeroplan.spec.recipe import Fsdp2Options, RecipeSpec
from zeroplan.verify.replaced import replaced

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = pytest.mark.torch

LONG = BatchSpec(micro_batch_size=2, seq_len=256)
NUMBERS = 40
"""Bytes that the estimate leaves out: a kernel's random state, constants of GPT-2's activation."""


def latent(case: str) -> JobSpec:
    """Return a job of a tiny model with latent attention, recomputed selectively. No kernel pads its head sizes."""
    spec = model_from_config(tiny_config(case) | {"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16})
    spec = replace(spec, num_hidden_layers=3)
    return JobSpec(model=spec, recipe=RecipeSpec(recompute="selective"), mesh=MeshSpec(dp_shard=4), batch=LONG)


def windowed(family: str, **fields: Any) -> JobSpec:
    """Return a job whose model has a sliding window of 128 tokens."""
    asked = job(family, **fields)
    return replace(asked, model=replace(asked.model, sliding_window=128))


def of_layers(layers: int, *, batch: BatchSpec = WEIGHTS, fsdp2: Fsdp2Options, **fields: Any) -> JobSpec:
    """Return a job whose blocks gather others ahead, or whose last block stays gathered."""
    asked = job(batch=batch, fsdp2=fsdp2, **fields)
    return replace(asked, model=replace(asked.model, num_hidden_layers=layers))


LIKE_AUTOMODEL = Fsdp2Options(keeps_last=True, forward_prefetch=1, backward_prefetch=2)
IN_PIECES: dict[str, Any] = {"fused_kernels": "loss-in-pieces", "precision": "bf16"}
FSDP2 = {
    "llama, selective": job(recompute="selective"),
    "llama, selective, activations dominate": job(recompute="selective", batch=LONG),
    "llama, selective, eager attention": job(recompute="selective", attention="eager", batch=LONG),
    "gpt2, selective": job("gpt2", recompute="selective"),
    "qwen3, selective": job("qwen3", recompute="selective", batch=LONG),
    "mixtral, selective": job("mixtral", ffn=256, recompute="selective", batch=LONG),
    "llama, fp32 logits kept": job(keep_logits="fp32", vocab=5000),
    "gpt2, fp32 logits kept": job("gpt2", keep_logits="fp32", vocab=5000),
    "llama, loss in chunks": job(loss="chunked", vocab=5000, batch=LONG),
    "llama, loss in chunks, recomputed": job(loss="chunked", vocab=9000, recompute="full", batch=LONG),
    "llama, loss in chunks, tied head, accumulation": job(
        loss="chunked", vocab=5000, tied=True, batch=replace(WEIGHTS, grad_accum_steps=2)
    ),
    "gpt2, loss in chunks": job("gpt2", loss="chunked", vocab=5000),
    "llama, loss in pieces": job(**IN_PIECES, vocab=9000, batch=LONG),
    "llama, loss in pieces of few tokens, tied head, recomputed": job(**IN_PIECES, vocab=9000, tied=True, recompute="full"),
    "llama, last block gathered, many words": of_layers(6, batch=LONG, fsdp2=Fsdp2Options(keeps_last=True), vocab=9000),
    "llama, one block ahead in the forward": of_layers(6, fsdp2=Fsdp2Options(forward_prefetch=1)),
    "llama, two blocks ahead in the backward": of_layers(6, fsdp2=Fsdp2Options(backward_prefetch=2)),
    "llama, both, last block gathered, recomputed": of_layers(6, fsdp2=LIKE_AUTOMODEL, recompute="full"),
    "llama, both, last block gathered, units of the ends": of_layers(
        6, fsdp2=replace(LIKE_AUTOMODEL, ends_apart=True), precision="bf16"
    ),
    "llama, more blocks ahead": of_layers(9, fsdp2=Fsdp2Options(forward_prefetch=2, backward_prefetch=3), precision="bf16"),
    "granite, selective": job("granite", recompute="selective", batch=LONG),
    "granite, loss in chunks": job("granite", loss="chunked", vocab=5000),
    "granite, full logits": job("granite", vocab=5000),
    "gemma2, loss in chunks": windowed("gemma2", loss="chunked", vocab=5000, batch=LONG),
    "mistral, beyond its window": windowed("mistral", batch=LONG),
}
DDP = {
    "llama, selective": job(engine="ddp", zero_stage=0, recompute="selective", batch=LONG),
    "llama, fp32 logits kept": job(engine="ddp", zero_stage=0, keep_logits="fp32", vocab=5000),
}


@pytest.mark.parametrize("name", FSDP2)
def test_the_tracker_sees_what_the_profiler_sees_and_the_same_on_fake_tensors(name: str):
    from tests.verify.watching.unwatched import unwatched_peaks, watched_peaks

    real = watched_peaks(FSDP2[name], fake=False)
    assert real == unwatched_peaks(FSDP2[name])
    assert watched_peaks(FSDP2[name], fake=True) == real


@pytest.mark.parametrize("name", DDP)
def test_under_ddp_the_tracker_sees_what_the_profiler_sees(name: str):
    from tests.verify.watching.unwatched import unwatched_peaks, watched_peaks

    assert watched_peaks(DDP[name], fake=False, steps=3) == unwatched_peaks(DDP[name], steps=3)


#: By how much the estimate may be too high. Mixtral's counts the gradient of the experts' outputs twice, in fp32 and cast, where
#: the run has already freed an operand. With a loss in pieces it counts the gradients of all pieces' hidden states at once.
ABOVE = {"mixtral, selective": 0.01, "llama, loss in pieces of few tokens, tied head, recomputed": 0.002}


@pytest.mark.parametrize("name", FSDP2)
def test_backward_and_peak_are_what_is_estimated(name: str):
    """The estimate leaves out scalars and batches of some hundred bytes, which show in the peak of a small job."""
    compared = compare_with_estimate(simulate(FSDP2[name]))
    backward = next(row for row in compared.phases if row.what == Phase.BACKWARD)
    for row in (compared.peak, backward):
        assert -0.0005 < row.error < ABOVE.get(name, 0.0005), row


@pytest.mark.parametrize("family", ["qwen2", "cohere2", "gemma3_text", "mistral"])
def test_with_padding_a_model_of_two_kinds_of_layers_builds_two_masks(family: str):
    """Qwen2 builds the global mask even where no layer reads it; Mistral's layers are all alike. A mask takes 131,072 bytes."""
    compared = compare_with_estimate(simulate(windowed(family, padded=True, batch=LONG)))
    backward = next(row for row in compared.phases if row.what == Phase.BACKWARD)
    for row in (compared.peak, backward):
        assert abs(row.difference) < 5_000, row


def test_selective_recomputation_keeps_every_second_product_and_the_results_of_attention():
    """A block keeps the first, third, fifth and seventh of its products, and its attention's output and log-sum-exp."""
    from tests.verify.watching.unwatched import watched

    tracker = watched(FSDP2["llama, selective"], fake=True)
    start = next(span.start for span in tracker.spans if (span.step, span.phase) == (1, Phase.BACKWARD))
    kept = sorted(
        (block.module.removeprefix("model.layers.1").removeprefix("."), block.n_bytes)
        for block in tracker.blocks
        if block.born <= start < block.died and block.kind is Kind.ACTIVATIONS and block.module.startswith("model.layers.1")
    )
    tokens, model = 2 * 64, FSDP2["llama, selective"].model
    hidden, value = 2 * tokens * model.hidden_size, 2 * tokens * model.num_key_value_heads * model.head_dim
    assert kept == [
        ("", hidden),  # its output, the next block's input
        ("mlp.down_proj", hidden),
        ("mlp.gate_proj", 2 * tokens * model.intermediate_size),
        ("self_attn", 4 * tokens * model.num_attention_heads),
        ("self_attn", hidden),
        ("self_attn.q_proj", hidden),
        ("self_attn.v_proj", value),
    ]


#: Jobs and the block to look at: latent attention, grouped heads in fp32 (CUDA writes out their scores), and fused attention.
BLOCKS = {
    "dense, latent attention": (latent("deepseek_v3"), "model.layers.0"),
    "moe, latent attention": (latent("deepseek_v3"), "model.layers.1"),
    "moe, latent attention, whole queries, biases": (latent("deepseek_v3, whole queries, biases"), "model.layers.1"),
    "dense, grouped heads in fp32": (job(recompute="selective", precision="fp32", batch=LONG), "model.layers.1"),
    "dense, phi3, grouped heads in fp32": (job("phi3", recompute="selective", precision="fp32", batch=LONG), "model.layers.1"),
    "dense, granite": (job("granite", recompute="selective"), "model.layers.1"),
    "dense, in fp32": (job("gpt2", recompute="selective", precision="fp32"), "transformer.h.1"),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_keeps_what_is_estimated_under_selective_recomputation(name: str):
    asked, block = BLOCKS[name]
    kept = on_the_fake_gpu(_kept, asked, block)
    lines = dict(estimate(asked).kept)[name.partition(",")[0]]
    assert 0 <= kept - sum(int(line.n_bytes) for line in lines) <= NUMBERS


def _kept(asked: JobSpec, block: str) -> int:
    """Return the bytes that a block has saved when the backward begins."""
    from zeroplan.verify.backends.simulate import _recorded  # the recording has every moment, a record only the peaks

    recording = _recorded(asked, 0, 1)
    start = next(span.start for span in recording.spans if span.phase is Phase.BACKWARD)
    return sum(
        one.n_bytes
        for one in recording.blocks
        if one.born <= start < one.died and one.kind is Kind.ACTIVATIONS and f"{one.module}.".startswith(f"{block}.")
    )


def test_a_run_that_reads_values_is_refused_in_one_line():
    with pytest.raises(MeasurementError, match=r"optimizer 'adamw' or engine 'fsdp2' reads values") as refused:
        on_the_fake_gpu(_read_a_value)
    assert "\n" not in str(refused.value)


def _read_a_value() -> None:
    from torch._subclasses.fake_tensor import DataDependentOutputException

    from zeroplan.verify.backends import simulate

    def reads(*_: object, **__: object) -> None:
        raise DataDependentOutputException(torch.ops.aten._local_scalar_dense.default)

    with replaced(simulate, "run", reads):
        simulate.simulate(job())


@pytest.mark.parametrize(("recipe", "says"), [
    ({"loss": "fused"}, "Liger"), ({"loss": "chunked", "engine": "ddp", "zero_stage": 0}, "only fsdp2 supports"),
    ({"loss": "chunked", "batch": BatchSpec(seq_len=15)}, "15 tokens do not divide into 8 chunks"),
    ({"attention": "flash"}, "GPUs only"),
])  # fmt: skip
def test_what_cannot_be_run_is_refused_in_one_line(recipe: dict[str, object], says: str):
    from zeroplan.verify.training.workload import workload

    with pytest.raises(MeasurementError, match=says):
        workload(job(**recipe), dtype=torch.float32, device="meta")


def test_blocks_are_resharded_over_as_many_ranks_as_said(monkeypatch: pytest.MonkeyPatch):
    """``True`` instead of a number would mean all ranks."""
    from zeroplan.verify.training import fsdp2

    passed = list[bool | int]()
    monkeypatch.setattr(fsdp2, "fully_shard", lambda _, **options: passed.append(options["reshard_after_forward"]))
    recipe = RecipeSpec(fsdp2=Fsdp2Options(reshard_after_forward=2))
    fsdp2.shard(torch.nn.Module(), [torch.nn.Module() for _ in range(3)], recipe, mesh=None, experts=None)
    assert passed == [2, 2, 2, False]
