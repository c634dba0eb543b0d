"""DeepSpeed's offload and ZeRO++, simulated: the peak, what is held, host memory and collectives are as estimated."""

from __future__ import annotations

from dataclasses import replace
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
from zeroplan.spec.recipe import DeepSpeedOptions, Fsdp2Options, RecipeSpec

pytestmark = [pytest.mark.torch, pytest.mark.deepspeed]

SMALL = ModelSpec(
    family="llama", hidden_size=256, intermediate_size=704, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    head_dim=64, vocab_size=1000,
)  # fmt: skip
STREAMED: dict[str, Any] = {
    "stage3_param_persistence_threshold": 1000, "stage3_prefetch_bucket_size": 100_000, "stage3_max_live_parameters": 400_000,
    "stage3_max_reuse_distance": 400_000,
}  # fmt: skip
BOTH = {"offload_optimizer": "cpu", "offload_param": "cpu"}


#: On six ranks its norms do not divide evenly; its matrices and their scales do.
UNEVEN = replace(SMALL, num_key_value_heads=4, head_dim=72, intermediate_size=720, vocab_size=1008)


def small(stage: int, *, model: ModelSpec = SMALL, ranks: int = 4, grad_accum: int = 1, **options: Any) -> Run:
    sizes = {"reduce_bucket_size": 200_000, **(STREAMED if stage == 3 else {})}
    return Run(
        JobSpec(
            model=model,
            recipe=RecipeSpec(engine="deepspeed", zero_stage=stage, deepspeed=DeepSpeedOptions(**sizes, **options)),
            mesh=MeshSpec(dp_shard=ranks),
            batch=BatchSpec(seq_len=64, grad_accum_steps=grad_accum),
        )
    )


RUNS = {
    "stage 1": small(1, offload_optimizer="cpu"),
    "stage 2, accumulating": small(2, offload_optimizer="cpu", grad_accum=3),
    "stage 2, accumulating in fp32, not pinned": small(
        2, offload_optimizer="cpu", grad_accum=2, grad_accum_dtype="fp32", offload_optimizer_pin_memory=False
    ),
    "stage 3, both, sub-groups": small(3, **BOTH, sub_group_size=100_000),
    "stage 3, both, one rank, accumulating": small(3, **BOTH, ranks=1, grad_accum=2),
    "stage 3, parameters": small(3, offload_param="cpu"),
    "hpZ, accumulating": small(3, zero_hpz_partition_size=2, grad_accum=2),
    "qwZ": small(3, zero_quantized_weights=True),
    "qgZ, accumulating": small(3, zero_quantized_gradients=True, gpus_per_node=2, grad_accum=2),
    "qgZ, uneven norms, kept in fp32": small(
        3, model=UNEVEN, ranks=6, zero_quantized_gradients=True, gpus_per_node=2, grad_accum_dtype="fp32"
    ),
    "all of ZeRO++": small(
        3, ranks=8, zero_hpz_partition_size=2, zero_quantized_weights=True, zero_quantized_gradients=True, gpus_per_node=2
    ),
    "FSDP2": Run(
        JobSpec(
            model=SMALL,
            recipe=RecipeSpec(fsdp2=Fsdp2Options(cpu_offload=True)),
            mesh=MeshSpec(dp_shard=4),
            batch=BatchSpec(seq_len=64),
        )
    ),
}
TODAY = of_the_day(__file__, RUNS)
#: Bytes of scalars: counters, norms, flags.
A_FEW_NUMBERS = 2000


@pytest.fixture(scope="module")
def compared() -> dict[str, Comparison]:
    records = answers(TODAY)
    return {name: compare_with_estimate(read(Measurement, record, where="record")) for name, record in records.items()}


@pytest.mark.parametrize("name", [name for name, run in TODAY.items() if run.job.recipe.offloads])
def test_host_memory_is_estimated_with_its_pinned_blocks(name: str, compared: dict[str, Comparison]):
    host = compared[name].host
    assert host is not None
    assert host.predicted > 0
    assert abs(host.difference) < A_FEW_NUMBERS


@pytest.mark.parametrize("name", TODAY)
def test_the_peak_and_held_bytes_are_estimated(name: str, compared: dict[str, Comparison]):
    found = compared[name]
    assert abs(found.peak.error) < 0.0025, found
    assert abs(found.held.difference) < A_FEW_NUMBERS, found


@pytest.mark.parametrize("name", TODAY)
def test_collectives_send_what_is_estimated(name: str, compared: dict[str, Comparison]):
    assert [row for row in compared[name].collectives if abs(row.difference) > A_FEW_NUMBERS] == []
