"""Models of which a part is frozen take what is estimated, without adapters, to within a thousandth."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.verify.training.test_adapted import SHAPE, SMALL
from zeroplan.comparison import compare_with_estimate
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


CASES = {
    "ddp, nothing before the third block": job("embedding,norm,head", 2, "ddp", 0),
    "ddp, a gradient through frozen blocks": job("head", 2, "ddp", 0, accum=2),
    "ddp, recomputed, tied": job("embedding,head", 1, "ddp", 0, precision="bf16", recompute="full", tied=True),
    "fsdp2, a block gathered in vain": job("embedding", 3, "fsdp2", 3),
    "fsdp2, attention written out, in host memory": job(
        "embedding", 2, "fsdp2", 3, attention="eager", fsdp2=Fsdp2Options(cpu_offload=True)
    ),
    "ddp, inputs of blocks in host memory": job("embedding,norm", 2, "ddp", 0, recompute="full", offload_activations=True),
    "fsdp2, recomputed": job("embedding,head", 2, "fsdp2", 3, recompute="full"),
    "fsdp2, a loss in chunks, a frozen head": job("norm,head", 1, "fsdp2", 3, loss="chunked"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_partly_frozen_model_takes_what_is_estimated(name: str):
    from tests.simulated import simulate

    asked = CASES[name]
    compared = compare_with_estimate(simulate(asked, steps=2 if asked.recipe.engine == "fsdp2" else 3))
    assert abs(compared.peak.error) < 0.001, compared.peak
    assert all(abs(phase.error) < 0.02 or abs(phase.difference) < SMALL for phase in compared.phases), compared.phases
    assert all(row.difference == 0 for row in compared.collectives), compared.collectives
