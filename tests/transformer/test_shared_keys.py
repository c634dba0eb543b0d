"""Compares Gemma 4's layers with embeddings of their own and shared keys with runs on the fake GPU, to the byte."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.causal_models import adapted_model
from tests.simulated import on_the_fake_gpu
from tests.transformer.drawn_blocks import Case, differences, differences_from, runs_of
from tests.transformer.tiny_configs import tiny_config
from zeroplan.catalog.config import model_from_config
from zeroplan.spec.adapter import AdapterSpec
from zeroplan.spec.batch import BatchSpec
from zeroplan.spec.model import ModelSpec
from zeroplan.transformer.activations import block_pass
from zeroplan.transformer.blocks import Compute
from zeroplan.transformer.parameters import BY_KEYS, kinds_by_keys
from zeroplan.transformer.params import layout

pytestmark = pytest.mark.torch

BATCH = BatchSpec(micro_batch_size=2, seq_len=64)
COMPUTES = {
    "bf16": Compute(2, autocast=False, attention="sdpa"),
    "bf16, recomputed": Compute(2, autocast=False, attention="sdpa", recompute="full"),
    "bf16, eager, recomputed": Compute(2, autocast=False, attention="eager", recompute="full"),
    "bf16, eager": Compute(2, autocast=False, attention="eager"),
    "bf16, selective": Compute(2, autocast=False, attention="sdpa", recompute="selective"),
    "fp32": Compute(4, autocast=False, attention="sdpa"),
    "fp32, eager, recomputed": Compute(4, autocast=False, attention="eager", recompute="full"),
    "autocast": Compute(2, autocast=True, attention="sdpa"),
    "autocast, recomputed": Compute(2, autocast=True, attention="sdpa", recompute="full"),
}


def model_with_shared_keys() -> ModelSpec:
    spec = model_from_config(tiny_config("gemma4_text, embeddings of each layer, shared keys"))
    return replace(spec, hidden_size=64, intermediate_size=128, vocab_size=104)


#: The last layer is not measured: no block follows it.
KINDS = tuple(kind for kind in BY_KEYS if kind != "global_last")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("compute", COMPUTES)
def test_a_layer_takes_what_is_said(kind: str, compute: str) -> None:
    spec = model_with_shared_keys()
    case = Case(spec, COMPUTES[compute], BATCH, max(1, kinds_by_keys(spec).index(kind)))  # layer 0 holds the tables, too
    assert on_the_fake_gpu(differences, case) == ()


@pytest.mark.parametrize("compute", COMPUTES)
@pytest.mark.parametrize("targets", ["all-linear", "attention"])
def test_a_layer_with_adapters_takes_what_is_said(targets: str, compute: str) -> None:
    """One run has every kind of layer. Only all-linear adapts what makes the embeddings of all layers."""
    pytest.importorskip("peft")
    spec = replace(model_with_shared_keys(), adapter=AdapterSpec(rank=4, targets=targets))
    numbers = [max(1, kinds_by_keys(spec).index(kind)) for kind in KINDS]
    case = Case(spec, COMPUTES[compute], BATCH, 1)
    for number, run in zip(numbers, on_the_fake_gpu(runs_of, case, numbers), strict=True):
        assert differences_from(run, case._replace(block=number)) == (), number


@pytest.mark.parametrize("targets", ["all-linear", "attention", "per_layer_model_projection"])
def test_adapters_are_those_that_peft_makes(targets: str) -> None:
    pytest.importorskip("peft")
    spec = replace(model_with_shared_keys(), adapter=AdapterSpec(rank=4, targets=targets))
    made = Counter((tuple(one.shape), one.requires_grad) for one in adapted_model(spec, COMPUTES["bf16"]).parameters())
    whole = layout(spec)
    said = [*whole.embeddings, *whole.tail, *(one for run in whole.runs for one in run.parameters * run.layers)]
    assert Counter((one.shape, not one.frozen) for one in said) == made


def test_layers_share_keys_of_the_last_layer_of_their_kind() -> None:
    spec = model_with_shared_keys()
    assert kinds_by_keys(spec) == (
        "local", "local", "global", "local", "local_stored", "global_stored", "local_shared", "local_shared", "global_shared",
        "local_shared", "local_next_to_last", "global_last",
    )  # fmt: skip
    assert spec.per_layer is not None
    alone = replace(spec, per_layer=replace(spec.per_layer, shared_layers=0, wide_mlp=False))
    assert kinds_by_keys(alone) == (*["local", "local", "global"] * 3, "local", "local", "global_last")


def test_a_recomputation_of_stored_keys_leaves_them_for_every_layer_below() -> None:
    """A gradient of shared keys waits only until the stored layer."""
    spec, compute = model_with_shared_keys(), COMPUTES["bf16, recomputed"]
    sizes = {}
    for kind in KINDS:
        one = block_pass(spec, kind, compute, BATCH, recomputed=True)
        sizes[kind] = sum(int(line.n_bytes) for line in one.arriving if line.kind == "activations")
    tokens, widths = BATCH.micro_batch_size * BATCH.seq_len, {"local": 16, "global": 32}
    assert sizes["local_shared"] == sizes["global_shared"] == sizes["global_stored"] == 0
    assert sizes["local"] == sizes["global"] > sizes["local_stored"] > 2 * 2 * tokens * widths["global"]
