"""The estimate of FSDP2 against a real run: the peak of forward, backward and step, and the states."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.causal_models import tiny_spec
from zeroplan.comparison import cpu_bytes
from zeroplan.engines import fsdp2
from zeroplan.engines.precisions import compute_of
from zeroplan.ledger import Moment, Phase, total_bytes
from zeroplan.spec.batch import BatchSpec
from zeroplan.spec.job import JobSpec
from zeroplan.spec.mesh import MeshSpec
from zeroplan.spec.recipe import Fsdp2Options, RecipeSpec
from zeroplan.verify.release import as_installed

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = pytest.mark.torch

#: What the estimate leaves out: scalars (the loss, the sum of its weights, step counters in host memory) and the random state
#: of the CPU's attention. [bytes]
SCALARS_BYTES = 2048

NARROW = {"heads": 4, "kv_heads": 2, "head_dim": 16, "layers": 5}
TOKENS = BatchSpec(micro_batch_size=2, seq_len=64)
WEIGHTS = BatchSpec(micro_batch_size=1, seq_len=32)


def job(family: str = "llama", *, ffn: int = 176, vocab: int = 250, batch: BatchSpec = TOKENS, n: int = 4, r: int = 1,
        tied: bool = False, **recipe: object) -> JobSpec:  # fmt: skip
    model = tiny_spec(family, ffn=ffn, vocab=vocab, **NARROW)
    said = {"engine": "fsdp2", "zero_stage": 3, "optimizer_impl": "fused", **recipe}
    return JobSpec(
        model=replace(model, tie_word_embeddings=model.tie_word_embeddings or tied),
        recipe=RecipeSpec(kernels="cpu", **said),
        mesh=MeshSpec(dp_shard=n, dp_replicate=r),
        batch=batch,
    )


TWICE = replace(WEIGHTS, grad_accum_steps=2)
THRICE = replace(WEIGHTS, grad_accum_steps=3)
HALF = Fsdp2Options(reduce_dtype="param")
CASES = {
    "llama": job(),
    "llama, weights dominate": job(ffn=512, batch=WEIGHTS),
    "llama, logits dominate": job(vocab=3000),
    "llama, logits kept": job(vocab=2500, keep_logits=True),
    "llama, recomputed": job(recompute="full"),
    "llama, recomputed, weights dominate": job(ffn=512, batch=WEIGHTS, recompute="full"),
    "llama, eager attention": job(attention="eager"),
    "llama, fp32": job(precision="fp32"),
    "llama, bf16, foreach": job(precision="bf16", optimizer_impl="foreach"),
    "llama, foreach": job(ffn=512, batch=WEIGHTS, optimizer_impl="foreach"),
    "llama, uneven shards": job(n=3),
    "llama, more ranks than rows of a norm": job(n=80, ffn=48),
    "llama, tied head": job(vocab=2000, tied=True),
    "llama, stage 2": job(zero_stage=2),
    "llama, stage 2, weights dominate": job(zero_stage=2, ffn=512, batch=WEIGHTS),
    "llama, resharded two ways": job(fsdp2=Fsdp2Options(reshard_after_forward=2), ffn=512, batch=WEIGHTS),
    "llama, gradients reduced in bf16": job(fsdp2=HALF, ffn=512, batch=WEIGHTS),
    "llama, replicas": job(r=2),
    "llama, replicas, gradients reduced in bf16": job(r=2, fsdp2=HALF, ffn=512, batch=WEIGHTS),
    "llama, accumulation": job(batch=TWICE, ffn=512),
    "llama, replicas, accumulation": job(r=2, batch=TWICE, ffn=512),
    "llama, replicas, bf16, accumulation": job(r=2, batch=THRICE, ffn=512, precision="bf16"),
    "llama, replicas, accumulation, reduced in bf16": job(r=2, batch=TWICE, ffn=512, fsdp2=HALF),
    "llama, replicas, accumulation without reduction": job(r=2, batch=TWICE, ffn=512, sync_every_micro_batch=False),
    "llama, tied head, accumulation": job(batch=TWICE, vocab=2000, tied=True),
    "llama, tied head, bf16": job(batch=WEIGHTS, vocab=2000, tied=True, precision="bf16"),
    "llama, tied head, fp32, accumulation": job(batch=TWICE, vocab=2000, tied=True, precision="fp32"),
    "llama, tied head, accumulation without reduction": job(batch=TWICE, vocab=2000, tied=True, sync_every_micro_batch=False),
    "llama, bf16, accumulation without reduction": job(batch=TWICE, vocab=3000, precision="bf16", sync_every_micro_batch=False),
    "llama, tied head, bf16, accumulation without reduction": job(
        batch=TWICE, vocab=2000, tied=True, precision="bf16", sync_every_micro_batch=False
    ),
    "llama, tied head, bf16, three micro-batches without reduction": job(
        batch=THRICE, vocab=2000, tied=True, precision="bf16", sync_every_micro_batch=False
    ),
    "llama, tied head, three micro-batches without reduction": job(
        batch=THRICE, vocab=2000, tied=True, sync_every_micro_batch=False
    ),
    "qwen2": job("qwen2"),
    "qwen3": job("qwen3"),
    "gpt2": job("gpt2"),
    "gpt2, weights dominate": job("gpt2", ffn=512, batch=WEIGHTS),
    "gpt2, recomputed": job("gpt2", recompute="full"),
    "mixtral": job("mixtral", ffn=128),
    "mixtral, weights dominate": job("mixtral", ffn=128, batch=WEIGHTS),
    "mixtral, recomputed": job("mixtral", ffn=256, recompute="full"),
    "mixtral, fewer experts than ranks": job("mixtral", ffn=128, n=8, batch=WEIGHTS),
}


def on_a_cpu(moment: Moment, case: JobSpec) -> int:
    """Return the moment's bytes with the CPU's kernels; ``zeroplan.comparison`` names every difference from CUDA."""
    compute = compute_of(case.recipe)
    ((_, kept),) = fsdp2.account(case.model, case.recipe, case.mesh, case.batch).kept
    whole = int(total_bytes(kept))
    blocks = sum(int(line.n_bytes) // whole for line in moment.lines if "S_" in line.formula)
    return int(cpu_bytes(moment.lines, compute)) - blocks * (whole - cpu_bytes(kept, compute))


@pytest.mark.parametrize("name", CASES)
def test_the_peak_of_every_phase_is_that_of_a_real_run(name: str):
    from tests.engines.sharded_training import CPU_ONLY, second_step

    case = as_installed(CASES[name])
    account = fsdp2.account(case.model, case.recipe, case.mesh, case.batch)
    timeline = second_step(case).without(*CPU_ONLY)
    micro = [f"1.{number}" for number in range(case.batch.grad_accum_steps)]
    measured = {
        "forward": max(timeline.peak_bytes(f"forward {name}", f"backward {name}") for name in micro),
        "backward": max(timeline.peak_bytes(f"backward {name}", f"after {name}") for name in micro),
        "step": timeline.peak_bytes("step 1", "end 1"),
    }
    phases = {
        "forward": [m for m in account.moments if m.phase is Phase.FORWARD or m.name == "loss, forward"],
        "backward": [m for m in account.moments if m.phase is Phase.BACKWARD or m.name == "backward of the loss"],
        "step": [m for m in account.moments if m.phase is Phase.STEP],
    }
    predicted = {phase: max(on_a_cpu(moment, case) for moment in moments) for phase, moments in phases.items()}
    for phase, n_bytes in measured.items():
        assert predicted[phase] == pytest.approx(n_bytes, rel=1e-4, abs=SCALARS_BYTES), (phase, predicted, measured)


@pytest.mark.parametrize("name", ["llama", "llama, uneven shards", "gpt2", "mixtral, fewer experts than ranks"])
def test_the_states_are_what_is_held_before_the_step(name: str):
    from tests.engines.sharded_training import second_step

    case = CASES[name]
    states = fsdp2.account(case.model, case.recipe, case.mesh, case.batch).states
    assert sum(int(line.n_bytes) for line in states) == pytest.approx(second_step(case).live_bytes("step 1"), abs=SCALARS_BYTES)


def test_fsdp_refuses_trained_weights_of_two_dtypes():
    """Therefore a job in bf16 is refused if its routers stay in fp32. Frozen weights may have another dtype than trained ones."""
    import torch
    from torch import nn
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    from tests.engines.sharded_training import fake_ranks

    class Routed(nn.Sequential):
        def __init__(self, *, trains_router: bool) -> None:
            super().__init__(nn.Linear(4, 4).requires_grad_(trains_router), nn.Linear(4, 4, dtype=torch.bfloat16))

        def forward(self, values: torch.Tensor) -> torch.Tensor:
            return self[1](self[0](values).bfloat16())

    with fake_ranks(job(n=2)) as mesh:
        with pytest.raises(AssertionError, match="uniform original parameter dtype"):
            fully_shard(Routed(trains_router=True), mesh=mesh)(torch.zeros(1, 4))
        with pytest.raises(ValueError, match="uniform dtype"):
            FullyShardedDataParallel(Routed(trains_router=True), device_id=torch.device("cpu"))
        fully_shard(Routed(trains_router=False), mesh=mesh)(torch.zeros(1, 4)).sum().backward()
