"""Models in bitsandbytes' 4 or 8 bits with peft's adapters: the peak is within 0.1 % of the estimate."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from tests.verify.training.test_adapted import TWO, job
from zeroplan.comparison import compare_with_estimate
from zeroplan.spec.adapter import AdapterSpec
from zeroplan.spec.batch import BatchSpec
from zeroplan.spec.mesh import MeshSpec

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("peft", reason="peft is not installed, and builds the adapters that are measured here")
pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed, and holds the weights that are measured here")
pytestmark = pytest.mark.torch

if TYPE_CHECKING:
    from zeroplan.spec.job import JobSpec

ALL, NESTED = AdapterSpec(rank=8, quantize="nf4"), AdapterSpec(rank=8, quantize="nf4-double")
FEW_TOKENS = BatchSpec(micro_batch_size=2, seq_len=16)


def alone(one: JobSpec) -> JobSpec:
    return replace(one, mesh=MeshSpec(dp_shard=1))


CASES = {
    "recomputed, accumulation": job(NESTED, "ddp", 0, recompute="full", accum=2),
    "one GPU, bf16": alone(job(ALL, "ddp", 0, precision="bf16", recompute="selective")),
    "weights written out are the peak": replace(job(replace(TWO, quantize="nf4-double"), "ddp", 0), batch=FEW_TOKENS),
    "FSDP2, packed weights stored as bf16": job(replace(NESTED, targets="q_proj,v_proj"), "fsdp2", 3, recompute="full"),
    "eight bits": job(AdapterSpec(rank=8, quantize="int8"), "ddp", 0),
    "eight bits, all in bf16, one GPU": alone(job(replace(TWO, quantize="int8"), "ddp", 0, precision="bf16")),
    "ZeroRedundancyOptimizer": job(replace(TWO, quantize="nf4"), "ddp", 1, precision="bf16"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_quantised_model_takes_what_is_estimated(name: str):
    from tests.simulated import simulate

    compared = compare_with_estimate(simulate(CASES[name], steps=3))
    assert abs(compared.peak.error) < 0.001, compared.peak
    beside = 16 * 1024  # a batch of token ids between steps, rotary frequencies, scalars
    assert all(abs(phase.error) < 0.005 or abs(phase.difference) < beside for phase in compared.phases), compared.phases
    states = [kind for kind in compared.kinds if kind.what in ("parameters", "optimizer state", "reduce buffers")]
    assert len(states) >= 2
    assert all(0 <= kind.measured - kind.predicted < 512 for kind in states), states  # rotary frequencies are left out


def test_real_layers_hold_the_bytes_that_are_counted():
    from tests.causal_models import adapted_model, tiny_spec
    from zeroplan.engines.quantised import quantised_lines
    from zeroplan.transformer.blocks import Compute
    from zeroplan.verify.training.adapters import quantisation_tensors

    bare = tiny_spec("qwen2", heads=5, kv_heads=1, head_dim=10, ffn=99, vocab=96)
    spec = replace(bare, adapter=NESTED)
    module = adapted_model(spec, Compute(2, autocast=False, attention="sdpa", kernels="cpu"))
    every = (*(one for one in module.parameters() if not one.requires_grad), *quantisation_tensors(module))
    held = sum({id(one): one.untyped_storage().nbytes() for one in every}.values())
    lines = quantised_lines(spec, "nf4-double", element_bytes=2, norm_bytes=2, end_bytes=2)
    assert held == sum(line.n_bytes for line in lines)
