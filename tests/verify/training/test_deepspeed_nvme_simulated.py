"""ZeRO-Infinity, simulated: DeepSpeed's own swapping without a disk. GPU, host memory and files are as estimated."""

from __future__ import annotations

from typing import Any

import pytest

from tests.combined import of_the_day
from tests.verify.training.test_deepspeed_simulated import Run, answers
from zeroplan.comparison import Comparison, compare_with_estimate
from zeroplan.measurement import Measurement
from zeroplan.spec.base import read
from zeroplan.spec.batch import BatchSpec
from zeroplan.spec.job import JobSpec
from zeroplan.spec.mesh import MeshSpec
from zeroplan.spec.model import ModelSpec
from zeroplan.spec.recipe import DeepSpeedOptions, RecipeSpec

pytestmark = [pytest.mark.torch, pytest.mark.deepspeed]

#: Wide enough for shares of 1 MiB, since smaller ones do not go to files.
WIDE = ModelSpec(
    family="llama", hidden_size=2048, intermediate_size=5632, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=2,
    head_dim=256, vocab_size=1000,
)  # fmt: skip
OPTIMIZER: dict[str, Any] = {"offload_optimizer": "nvme"}
PARAMETERS: dict[str, Any] = {"offload_param": "nvme", "offload_param_buffer_size": 12_000_000}
PIPELINE: dict[str, Any] = {
    "sub_group_size": 4_000_000, "offload_optimizer_buffer_count": 12, "offload_optimizer_pipeline_read": True,
    "offload_optimizer_pipeline_write": True,
}  # fmt: skip


def wide(*, ranks: int = 4, grad_accum: int = 1, **options: Any) -> Run:
    sizes = {
        "reduce_bucket_size": 5_000_000, "stage3_param_persistence_threshold": 3000, "stage3_prefetch_bucket_size": 5_000_000,
        "stage3_max_live_parameters": 20_000_000, "stage3_max_reuse_distance": 20_000_000,
    }  # fmt: skip
    return Run(
        JobSpec(
            model=WIDE,
            recipe=RecipeSpec(engine="deepspeed", zero_stage=3, deepspeed=DeepSpeedOptions(**sizes, **options)),
            mesh=MeshSpec(dp_shard=ranks),
            batch=BatchSpec(seq_len=64, grad_accum_steps=grad_accum),
        )
    )


RUNS = {
    "optimizer": wide(**OPTIMIZER),
    "three ranks, whose gradients are no multiples of 1 KiB, in a pipeline": wide(**OPTIMIZER, **PIPELINE, ranks=3),
    "both, weights in host memory": wide(**OPTIMIZER, **PARAMETERS),
    "both, weights on NVMe, accumulating": wide(**OPTIMIZER, **PARAMETERS, offload_param_max_in_cpu=0, grad_accum=2),
    "weights, one rank": wide(
        **PARAMETERS, offload_optimizer="cpu", offload_param_max_in_cpu=0, offload_param_buffer_count=8, ranks=1
    ),
}
TODAY = of_the_day(__file__, RUNS)
#: Bytes of scalars: counters, norms, flags.
A_FEW_NUMBERS = 2000


@pytest.fixture(scope="module")
def compared() -> dict[str, Comparison]:
    records = answers(TODAY)
    return {name: compare_with_estimate(read(Measurement, record, where="record")) for name, record in records.items()}


@pytest.mark.parametrize("name", TODAY)
def test_every_file_and_buffer_is_estimated(name: str, compared: dict[str, Comparison]):
    found = compared[name]
    assert found.nvme is not None
    assert found.nvme.predicted == found.nvme.measured > 0
    assert found.host is not None
    assert abs(found.host.difference) < A_FEW_NUMBERS


@pytest.mark.parametrize("name", TODAY)
def test_the_peak_and_held_bytes_are_estimated(name: str, compared: dict[str, Comparison]):
    found = compared[name]
    assert abs(found.peak.error) < 0.0035, found
    assert abs(found.held.difference) < A_FEW_NUMBERS, found
