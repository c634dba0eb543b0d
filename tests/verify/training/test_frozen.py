"""Partly frozen models without adapters: the peak is within 0.1 % of the estimate."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.combined import of_the_day
from tests.verify.training.test_adapted import BUCKET, IN_FP32, SHAPE, SMALL, STREAM
from tests.verify.training.test_deepspeed_simulated import Run, answers
from zeroplan.comparison import Comparison, compare_with_estimate
from zeroplan.measurement import Measurement
from zeroplan.spec.base import read
from zeroplan.spec.batch import BatchSpec
from zeroplan.spec.frozen import FrozenSpec
from zeroplan.spec.job import JobSpec
from zeroplan.spec.mesh import MeshSpec
from zeroplan.spec.recipe import Fsdp2Options, RecipeSpec

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = pytest.mark.torch


def job(parts: str, layers: int, engine: str, stage: int, *, accum: int = 1, tied: bool = False, **fields: Any) -> JobSpec:
    frozen = FrozenSpec(parts=parts, layers=layers)
    return JobSpec(
        model=replace(SHAPE, frozen=frozen, tie_word_embeddings=tied),
        recipe=RecipeSpec(engine=engine, zero_stage=stage, **fields),
        mesh=MeshSpec(dp_shard=4),
        batch=BatchSpec(micro_batch_size=2, seq_len=256, grad_accum_steps=accum),
    )


MULTIPLIED = replace(SHAPE, family="granite", attention_bias=False, frozen=FrozenSpec(parts="embedding,head", layers=2))
CASES = {
    "ddp, nothing before the third block": job("embedding,norm,head", 2, "ddp", 0),
    "ddp, a gradient through frozen blocks": job("head", 2, "ddp", 0, accum=2),
    "ddp, recomputed, tied": job("embedding,head", 1, "ddp", 0, precision="bf16", recompute="full", tied=True),
    "fsdp2, a block gathered in vain": job("embedding", 3, "fsdp2", 3),
    "fsdp2, attention written out, in host memory": job(
        "embedding", 2, "fsdp2", 3, attention="eager", fsdp2=Fsdp2Options(cpu_offload=True)
    ),
    "ddp, inputs of blocks in host memory": job("embedding,norm", 2, "ddp", 0, recompute="full", offload_activations=True),
    "ddp, all that blocks save in host memory": job("embedding,norm", 2, "ddp", 0, offload_activations=True),
    "fsdp2, recomputed": job("embedding,head", 2, "fsdp2", 3, recompute="full"),
    "fsdp2, recomputed, embeddings that are multiplied": replace(
        job("embedding,head", 2, "fsdp2", 3, recompute="full"), model=MULTIPLIED
    ),
    "fsdp2, a loss in chunks, a frozen head": job("norm,head", 1, "fsdp2", 3, loss="chunked"),
}
#: These run in a process of their own, since DeepSpeed patches torch for good.
DEEPSPEED = {
    "stage 0, nothing before the third block": job("embedding,norm,head", 2, "deepspeed", 0),
    "stage 0, a gradient through frozen blocks": job("head", 2, "deepspeed", 0, accum=2),
    "stage 0, fp32, recomputed, tied": job("embedding,head", 1, "deepspeed", 0, precision="fp32", recompute="full", tied=True),
    "stage 0, fp16": job("norm", 0, "deepspeed", 0, precision="fp16-mixed"),
    "stage 1": job("embedding", 2, "deepspeed", 1, deepspeed=BUCKET),
    "stage 1, gradients added up in fp32": job("", 2, "deepspeed", 1, accum=2, deepspeed=IN_FP32),
    "stage 1, bf16": job("embedding,norm", 1, "deepspeed", 1, precision="bf16", deepspeed=BUCKET),
    "stage 2": job("embedding", 3, "deepspeed", 2, deepspeed=BUCKET),
    "stage 2, recomputed, accumulation": job(
        "embedding,norm,head", 2, "deepspeed", 2, recompute="full", accum=2, deepspeed=BUCKET
    ),
    "stage 2, a gradient through frozen blocks, tied": job("", 2, "deepspeed", 2, tied=True, deepspeed=BUCKET),
    "stage 2, gradients added up in fp32, overlap": job(
        "head", 2, "deepspeed", 2, accum=2, deepspeed=replace(IN_FP32, overlap_comm=True)
    ),
    "stage 2, attention written out, no contiguous bucket": job(
        "embedding,head", 1, "deepspeed", 2, attention="eager", deepspeed=replace(BUCKET, contiguous_gradients=False)
    ),
    "stage 2, fp32, recomputed selectively": job(
        "embedding", 1, "deepspeed", 2, precision="fp32", recompute="selective", deepspeed=BUCKET
    ),
    "stage 2, states in host memory": job("embedding", 2, "deepspeed", 2, deepspeed=replace(BUCKET, offload_optimizer="cpu")),
    "stage 3, streaming, nothing before the third block": job("embedding,norm,head", 2, "deepspeed", 3, deepspeed=STREAM),
    "stage 3, streaming, a gradient through frozen blocks, tied": job(
        "", 2, "deepspeed", 3, accum=2, tied=True, deepspeed=STREAM
    ),
    "stage 3, streaming, recomputed": job("embedding,head", 2, "deepspeed", 3, recompute="full", deepspeed=STREAM),
    "stage 3, streaming, fp32, attention written out, 2 blocks recomputed": job(
        "embedding",
        1,
        "deepspeed",
        3,
        precision="fp32",
        attention="eager",
        recompute="full",
        recompute_layers=2,
        deepspeed=STREAM,
    ),
    "stage 3, no contiguous bucket": job("head", 2, "deepspeed", 3, deepspeed=replace(STREAM, contiguous_gradients=False)),
    "stage 3, states and parameters in host memory": job(
        "embedding", 2, "deepspeed", 3, deepspeed=replace(STREAM, offload_optimizer="cpu", offload_param="cpu")
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_partly_frozen_model_takes_what_is_estimated(name: str):
    from tests.simulated import simulate

    asked = CASES[name]
    _agrees(compare_with_estimate(simulate(asked, steps=2 if asked.recipe.engine == "fsdp2" else 3)))


TODAY = of_the_day(__file__, DEEPSPEED)


@pytest.fixture(scope="module")
def under_deepspeed() -> dict[str, dict[str, Any]]:
    return answers({name: Run(one) for name, one in TODAY.items()})


@pytest.mark.deepspeed
@pytest.mark.parametrize("name", TODAY)
def test_a_partly_frozen_model_under_deepspeed_takes_what_is_estimated(name: str, under_deepspeed: dict[str, dict[str, Any]]):
    _agrees(compare_with_estimate(read(Measurement, under_deepspeed[name], where="record")))


def _agrees(compared: Comparison) -> None:
    assert abs(compared.peak.error) < 0.001, compared.peak
    assert all(abs(phase.error) < 0.02 or abs(phase.difference) < SMALL for phase in compared.phases), compared.phases
    assert all(row.difference == 0 for row in compared.collectives), compared.collectives
