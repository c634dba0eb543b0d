"""Autocast on the pretended GPU: CUDA's lists, as torch's header has them, and what each list does."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.transformer.tiny_configs import tiny_config
from zeroplan.catalog.config import model_from_config
from zeroplan.comparison import compare_with_estimate
from zeroplan.spec.batch import BatchSpec
from zeroplan.spec.job import JobSpec
from zeroplan.spec.mesh import MeshSpec
from zeroplan.spec.recipe import RecipeSpec, Recompute

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = pytest.mark.torch


@pytest.mark.parametrize(("macro", "ours"), [
    ("LOWER_PRECISION_FP", "IN_16_BITS"), ("FP32", "IN_32_BITS"), ("FP32_SET_OPT_DTYPE", "INTO_32_BITS"), ("PROMOTE", "WIDEST"),
])  # fmt: skip
def test_the_lists_are_those_of_torch(macro: str, ours: str):
    from zeroplan.verify.pretended import card_autocast

    header = (Path(torch.__file__).parent / "include/ATen/autocast_mode.h").read_text()
    lines = re.search(rf"#define AT_FORALL_{macro}\(_\)((?:.*\\\n)*.*\n)", header)
    assert lines is not None
    found = re.findall(r"_\((\w+)(?:, (\w+))?\)", lines[1])
    assert set(getattr(card_autocast, ours)) == {f"{name}.{overload}" if overload else name for name, overload in found}


def test_each_list_does_what_it_says():
    from torch._subclasses.fake_tensor import FakeTensorMode

    from zeroplan.verify.pretended.card import CARD, install
    from zeroplan.verify.pretended.card_autocast import cuda_lists

    install()
    with cuda_lists(), FakeTensorMode(), torch.device(CARD):
        weight, bits = torch.empty(8, 8, requires_grad=True), torch.empty(8, 8, dtype=torch.bfloat16)
        with torch.autocast(CARD, dtype=torch.bfloat16):
            assert (bits @ weight).dtype == (weight @ weight).dtype == torch.bfloat16
            assert bits.exp().dtype == bits.softmax(0).dtype == torch.float32
            assert bits.softmax(0, dtype=torch.bfloat16).dtype == torch.bfloat16
            assert bits.add(1).dtype == torch.bfloat16
            assert torch.addcmul(weight, bits, bits).dtype == torch.float32
        assert (weight @ weight).dtype == torch.float32


def test_a_weight_is_cast_once():
    from torch._subclasses.fake_tensor import FakeTensorMode

    from zeroplan.verify.pretended.card import CARD, install
    from zeroplan.verify.pretended.card_autocast import cuda_lists
    from zeroplan.verify.watching.tracker import Tracker

    install()
    tracker = Tracker(device=CARD)
    with cuda_lists(), FakeTensorMode(), tracker, torch.device(CARD):
        weight, x = torch.empty(8, 8, requires_grad=True), torch.empty(2, 8, dtype=torch.bfloat16)
        with torch.autocast(CARD, dtype=torch.bfloat16):
            for _ in range(3):
                x @ weight
    casts = [block for block in tracker.recording.blocks if block.n_bytes == 8 * 8 * 2]
    assert len(casts) == 1
    assert casts[0].died is not None


@pytest.mark.parametrize(("family", "recompute"), [
    ("llama", "none"), ("llama", "full"), ("gpt2", "none"), ("gemma3_text", "none"), ("mixtral", "none"),
])  # fmt: skip
def test_a_run_takes_what_is_estimated(family: str, recompute: Recompute):
    from zeroplan.verify.backends.simulate import simulate

    job = JobSpec(
        model=replace(model_from_config(tiny_config(family)), num_hidden_layers=2),
        recipe=RecipeSpec(engine="ddp", zero_stage=0, precision="bf16-mixed", recompute=recompute),
        mesh=MeshSpec(dp_shard=2),
        batch=BatchSpec(micro_batch_size=8, seq_len=64),
    )
    found = compare_with_estimate(simulate(job, steps=3))
    assert abs(found.peak.error) < 0.0005, found
    assert found.peak.measured > 0
