"""torchao's float8 layers under FSDP2 against the estimate, on the fake GPU."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from tests.combined import BY_NIGHT
from tests.simulated import simulate
from zeroplan import Fsdp2Options, ModelSpec, estimate, job
from zeroplan.spec.family import modelled

if TYPE_CHECKING:
    from zeroplan.spec.job import JobSpec

torchao = pytest.importorskip("torchao")
pytestmark = pytest.mark.torch

#: Small vocabulary and long sequences, so that the blocks' own temporaries are the peak.
TINY = ModelSpec(
    family="llama", hidden_size=128, intermediate_size=320, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=4,
    head_dim=16, vocab_size=64,
)  # fmt: skip


def _difference(asked: JobSpec) -> int:
    """Return what a run needs beyond the estimate. [bytes]"""
    found, measured = estimate(asked), simulate(asked)
    return measured.steady.peak.peak_bytes - (found.peak_bytes - sum(int(line.n_bytes) for line in found.workspaces))


BIASED = ("llama", "qwen2", "glm", "starcoder2", "jais2")
WINDOWED = ("gemma2", "gemma3_text", "olmo3", "cohere2", "cwm")


@pytest.mark.parametrize("family", modelled("float8"))
@pytest.mark.parametrize(("recipe", "recompute"), [("tensorwise", "full"), ("rowwise", "none")])
def test_the_peak_is_that_of_torchaos_own_layers(family: str, recipe: str, recompute: str) -> None:
    if family in ("gemma2", "cwm") and recompute == "full":
        pytest.skip("recomputed layers with masks of two kinds count both, in float8 or not (docs/limits.md)")
    biases = {"attention_bias": family in BIASED, "mlp_bias": family in ("llama", "starcoder2", "jais2")}
    model = replace(TINY, family=family, sliding_window=128 if family in WINDOWED else None, **biases)
    asked = job(
        model=model, gpus=2, stage=3, engine="fsdp2", seq_len=256, micro_batch=2, recompute=recompute, float8_recipe=recipe
    )
    plain = replace(asked, recipe=replace(asked.recipe, float8_recipe=None))
    found, measured = estimate(asked), simulate(asked)
    # the estimate leaves out one number of 4 or 8 bytes for each scale and product
    requested = found.peak_bytes - sum(int(line.n_bytes) for line in found.workspaces)
    assert 0 <= measured.steady.peak.peak_bytes - requested <= 0.0005 * requested
    if family != "gemma2":  # its peak is in a softmax, not in a linear layer
        assert found.peak_bytes > estimate(plain).peak_bytes


def gathered(seed: int) -> JobSpec:
    """Return the job that a seed draws, whose ranks gather weights in float8."""
    dice = random.Random(seed)  # noqa: S311  no secret
    model = replace(
        TINY, family=dice.choice(("llama", "qwen3", "olmo2", "granite")), hidden_size=dice.choice((128, 256)),
        intermediate_size=dice.choice((320, 768)), vocab_size=dice.choice((64, 1000)), num_hidden_layers=dice.choice((2, 3)),
    )  # fmt: skip
    return job(
        model=model, gpus=dice.choice((1, 2, 4, 8)), stage=dice.choice((2, 3)), engine="fsdp2", seq_len=dice.choice((64, 256)),
        recompute=dice.choice(("full", "none")), float8_recipe="tensorwise", precision=dice.choice(("bf16-mixed", "bf16")),
        grad_accum=dice.choice((1, 2)), fsdp2=Fsdp2Options(float8_all_gather=True, ends_apart=dice.random() < 0.3),
    )  # fmt: skip


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=BY_NIGHT) for seed in range(2, 40))])
def test_weights_that_ranks_gather_in_float8(seed: int) -> None:
    asked = gathered(seed)
    # left out: numbers for each scale and product, and for each scale that ranks exchange
    assert 0 <= _difference(asked) < 6000


def test_the_ranks_send_half_and_the_largest_values() -> None:
    asked = gathered(0)
    predicted, measured = Counter[str](), Counter[str]()
    for call in filter(lambda one: one.group > 1, estimate(asked).traffic.collectives):
        predicted.update({f"{call.operation}, calls": int(call.calls), f"{call.operation}, bytes": int(call.payload_bytes)})
    for found in simulate(asked).collectives:
        measured.update({f"{found.operation}, calls": found.calls, f"{found.operation}, bytes": found.n_bytes})
    assert {what: predicted[what] for what in measured} == measured
