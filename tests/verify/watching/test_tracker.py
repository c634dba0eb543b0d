"""The tracker's peaks equal the profiler's on real tensors, and are the same on fake ones, to the byte."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.causal_models import tiny_spec
from zeroplan.spec.batch import BatchSpec
from zeroplan.spec.job import JobSpec
from zeroplan.spec.mesh import MeshSpec
from zeroplan.spec.recipe import DdpOptions, Fsdp2Options, RecipeSpec

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from zeroplan.verify.watching.recording import STILL_HELD  # noqa: E402
from zeroplan.verify.watching.tracker import Tracker  # noqa: E402

pytestmark = pytest.mark.torch

NARROW = {"heads": 4, "kv_heads": 2, "head_dim": 32, "layers": 3}
TOKENS = BatchSpec(micro_batch_size=2, seq_len=64)
WEIGHTS = BatchSpec(micro_batch_size=1, seq_len=32)
TWICE = replace(WEIGHTS, grad_accum_steps=2)
HALF = Fsdp2Options(reduce_dtype="param")


def job(family: str = "llama", *, ffn: int = 352, vocab: int = 500, batch: BatchSpec = TOKENS, n: int = 4, r: int = 1,
        tied: bool = False, **recipe: object) -> JobSpec:  # fmt: skip
    model = tiny_spec(family, ffn=ffn, vocab=vocab, **NARROW)
    return JobSpec(
        model=replace(model, tie_word_embeddings=model.tie_word_embeddings or tied),
        recipe=RecipeSpec(**{"engine": "fsdp2", "zero_stage": 3, **recipe}),
        mesh=MeshSpec(dp_shard=n, dp_replicate=r),
        batch=batch,
    )


FSDP2 = {
    "llama": job(),
    "llama, weights dominate": job(ffn=1024, batch=WEIGHTS),
    "llama, logits kept": job(vocab=5000, keep_logits=True),
    "llama, recomputed": job(recompute="full"),
    "llama, eager attention": job(attention="eager"),
    "llama, fp32": job(precision="fp32"),
    "llama, bf16, fused": job(precision="bf16", optimizer_impl="fused"),
    "llama, uneven shards": job(n=3),
    "llama, tied head": job(vocab=4000, tied=True),
    "llama, stage 2": job(zero_stage=2, ffn=1024, batch=WEIGHTS),
    "llama, resharded two ways": job(fsdp2=Fsdp2Options(reshard_after_forward=2)),
    "llama, replicas": job(r=2),
    "llama, replicas, gradients reduced in bf16": job(r=2, fsdp2=HALF, ffn=1024, batch=WEIGHTS),
    "llama, accumulation": job(batch=TWICE, ffn=1024),
    "llama, accumulation without reduction": job(batch=TWICE, ffn=1024, sync_every_micro_batch=False),
    "llama, one rank": job(n=1),
    "llama, sgd": job(optimizer="sgd-momentum"),
    "qwen3": job("qwen3"),
    "gpt2": job("gpt2"),
    "gpt2, recomputed": job("gpt2", recompute="full"),
    "mixtral": job("mixtral", ffn=256),
    "mixtral, fewer experts than ranks": job("mixtral", ffn=256, n=8, batch=WEIGHTS),
}


DDP = {
    "ddp": job(engine="ddp", zero_stage=0),
    "ddp, weights dominate": job(engine="ddp", zero_stage=0, ffn=1024, batch=WEIGHTS, precision="fp32"),
    "ddp, bucket views": job(engine="ddp", zero_stage=0, precision="bf16", ddp=DdpOptions(gradient_as_bucket_view=True)),
    "ddp, accumulation": job(engine="ddp", zero_stage=0, batch=TWICE, sync_every_micro_batch=False),
    "ddp, bucket views, accumulation": job(
        engine="ddp", zero_stage=0, ffn=1024, batch=TWICE, ddp=DdpOptions(gradient_as_bucket_view=True)
    ),
    "ddp, recomputed": job(engine="ddp", zero_stage=0, recompute="full"),
    "ddp, mixtral": job("mixtral", engine="ddp", zero_stage=0, ffn=256, batch=WEIGHTS),
    "zero-1": job(engine="ddp", zero_stage=1, batch=WEIGHTS),
    "zero-1, fused": job("gpt2", engine="ddp", zero_stage=1, batch=WEIGHTS, optimizer_impl="fused"),
}


@pytest.mark.parametrize("name", [*FSDP2, *DDP])
def test_the_tracker_sees_what_the_profiler_sees_and_the_same_on_fake_tensors(name: str):
    """Every collective of the real run is in the fake one, too."""
    from tests.verify.watching.unwatched import tracked_peaks, unwatched_peaks, watched

    asked = (FSDP2 | DDP)[name]
    steps = 3 if name in DDP else 2  # DDP rebuilds its buckets in the second
    real, fake = (watched(asked, fake=fake, steps=steps) for fake in (False, True))
    assert tracked_peaks(real) == unwatched_peaks(asked, steps=steps)
    assert tracked_peaks(fake) == tracked_peaks(real)
    sent, said = ([call._replace(moment=0) for call in run.calls] for run in (real, fake))  # gloo requests blocks in between
    assert sent == said
    assert bool(real.calls) == (asked.mesh.world_size > 1)


def test_a_release_after_the_end_does_not_change_the_recording() -> None:
    """The collector of Python may free a model while the recording is being read."""
    tracker = Tracker(device="cpu")
    with tracker:
        made = torch.zeros(100)
    recording = tracker.finished()
    (block,) = recording.blocks
    del made
    assert (block.died, tracker.now) == (STILL_HELD, recording.now)
