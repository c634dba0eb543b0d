"""Simulated runs of Lion, Muon and 8-bit AdamW are as estimated; the first step takes no more than the estimate."""

from __future__ import annotations

from dataclasses import replace

import pytest

from zeroplan.catalog.model import model
from zeroplan.comparison import compare_with_estimate
from zeroplan.errors import MeasurementError
from zeroplan.spec.batch import BatchSpec
from zeroplan.spec.job import JobSpec
from zeroplan.spec.mesh import MeshSpec
from zeroplan.spec.recipe import DdpOptions, RecipeSpec

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = pytest.mark.torch


def small(recipe: RecipeSpec) -> JobSpec:
    """Return a job of two layers of GPT-2 and few tokens, so that the optimizer step is the peak if it can be."""
    gpt2 = replace(model("gpt2"), num_hidden_layers=2)
    return JobSpec(model=gpt2, recipe=recipe, mesh=MeshSpec(dp_shard=4), batch=BatchSpec(seq_len=8))


@pytest.mark.parametrize("optimizer", ["lion", "muon"])
@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_the_step_takes_what_is_estimated(engine: str, optimizer: str):
    from tests.simulated import simulate

    stage = 0 if engine == "ddp" else 3
    found = compare_with_estimate(simulate(small(RecipeSpec(engine=engine, zero_stage=stage, optimizer=optimizer))))  # type: ignore[arg-type]
    assert abs(found.peak.difference) < 1024
    assert all(abs(row.difference) < 1024 for row in found.phases)
    assert abs(found.held.difference) < 1024


_WIDE, _FLAT = {"hidden_size": 4096, "intermediate_size": 11008}, {"hidden_size": 1024, "intermediate_size": 3072}


@pytest.mark.parametrize(
    ("ranks", "sizes", "sends"),
    [  # DTensor chooses by sizes and ranks whether to gather a matrix or to swap its rows for columns with an all-to-all
        (2, _FLAT, {"all_gather", "all_reduce"}),
        (3, _FLAT, {"all_gather", "all_reduce", "reduce_scatter", "all_to_all"}),
        (4, _WIDE, {"all_gather", "all_reduce", "reduce_scatter", "all_to_all"}),
        (64, _WIDE, {"all_gather", "all_reduce", "reduce_scatter", "all_to_all"}),
    ],
)
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16"])
def test_muon_holds_and_sends_what_dtensor_chooses(ranks: int, sizes: dict[str, int], sends: set[str], precision: str):
    assert muon_sends(MeshSpec(dp_shard=ranks), sizes, precision) == sends | {"reduce_scatter"}


_ODD = {"hidden_size": 1040, "intermediate_size": 3001, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 130}


@pytest.mark.parametrize(
    ("replicas", "ranks", "sizes"),
    [  # within a node, across nodes, and with shards of unequal size
        (2, 2, _FLAT), (2, 4, _WIDE), (8, 8, _WIDE), (3, 5, _WIDE), (7, 9, _WIDE), (2, 7, _ODD), (5, 24, _ODD), (4, 1, _FLAT),
    ],
)  # fmt: skip
@pytest.mark.parametrize("precision", ["bf16", "bf16-mixed"])
def test_replicas_take_part_in_muons_step_as_dtensor_chooses(replicas: int, ranks: int, sizes: dict[str, int], precision: str):
    assert "all_reduce" in muon_sends(MeshSpec(dp_shard=ranks, dp_replicate=replicas), sizes, precision)


def muon_sends(mesh: MeshSpec, sizes: dict[str, int], precision: str) -> set[str]:
    """Compare a step of Muon with its estimate; return the collectives that were sent."""
    from tests.simulated import simulate

    shape = replace(model("llama-2-7b"), num_hidden_layers=1, vocab_size=512, **sizes)  # type: ignore[arg-type]
    recipe = RecipeSpec(engine="fsdp2", optimizer="muon", precision=precision)  # type: ignore[arg-type]
    found = compare_with_estimate(simulate(JobSpec(model=shape, recipe=recipe, mesh=mesh, batch=BatchSpec(seq_len=8))))
    assert all(abs(row.difference) < 1024 for row in found.phases)
    assert all(row.difference == 0 for row in found.collectives)
    return {row.what for row in found.collectives if row.measured}


@pytest.mark.parametrize("stage", [0, 1])
def test_8_bit_adamw_is_bitsandbytes_own_and_takes_what_is_estimated(stage: int):
    from tests.simulated import simulate

    pytest.importorskip("bitsandbytes")
    recipe = RecipeSpec(engine="ddp", zero_stage=stage, optimizer="adamw-8bit")  # type: ignore[arg-type]
    found = compare_with_estimate(simulate(small(recipe)))
    assert abs(found.peak.difference) < 1024
    assert all(abs(row.difference) < 1024 for row in (*found.phases, found.held))
    assert {row.what: abs(row.difference) < 1024 for row in found.kinds}["optimizer state"]


def test_8_bit_adamw_without_bitsandbytes_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch):
    from zeroplan.verify.training import optimizers

    monkeypatch.setattr(optimizers, "find_spec", lambda _: None)
    with pytest.raises(MeasurementError, match="which is not installed; install bitsandbytes"):
        optimizers.make_optimizer(iter(()), RecipeSpec(engine="ddp", zero_stage=0, optimizer="adamw-8bit"))


@pytest.mark.parametrize(
    "recipe",
    [
        RecipeSpec(engine="fsdp2", precision="fp32"),
        RecipeSpec(engine="ddp", zero_stage=0, ddp=DdpOptions(gradient_as_bucket_view=True)),
    ],
    ids=lambda recipe: recipe.engine,
)
def test_the_first_step_takes_no_more_than_the_estimate_and_later_steps_are_equal(recipe: RecipeSpec):
    from tests.simulated import simulate

    measured = simulate(small(recipe), steps=5)
    first, second, *others = [step.peak.peak_bytes for step in measured.steps]
    assert first <= compare_with_estimate(measured).peak.predicted + 1024
    assert others == [second] * 3


def test_lion_steps_as_published():
    from zeroplan.verify.training.optimizers import Lion

    weight, momentum = torch.tensor([1.0, -2.0]), torch.zeros(2)
    parameter = torch.nn.Parameter(weight.clone())
    optimizer = Lion([parameter], lr=0.1, betas=(0.9, 0.99), weight_decay=0.5)
    for gradient in (torch.tensor([3.0, -4.0]), torch.tensor([-0.1, 50.0])):
        parameter.grad = gradient
        optimizer.step()
        weight = weight - 0.1 * (torch.sign(0.9 * momentum + 0.1 * gradient) + 0.5 * weight)
        momentum = 0.99 * momentum + 0.01 * gradient
    torch.testing.assert_close(parameter.detach(), weight)


def test_what_cannot_be_run_is_refused_in_one_line():
    from zeroplan.verify.training.optimizers import make_optimizer, zero_redundancy

    fused = RecipeSpec(engine="deepspeed", zero_stage=2, optimizer="lion", optimizer_impl="fused")
    with pytest.raises(MeasurementError, match="DeepSpeed's FusedLion is a kernel for GPUs"):
        make_optimizer(iter(()), fused)
    with pytest.raises(MeasurementError, match="optimizer 'muon' cannot be run here"):
        zero_redundancy(iter(()), RecipeSpec(engine="ddp", zero_stage=1, optimizer="muon"))
