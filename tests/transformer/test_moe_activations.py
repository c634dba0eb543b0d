"""Compares every tensor that a block with experts keeps, and every peak of its passes, with real modules on a CPU."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.causal_models import causal_model
from tests.combined import combined
from tests.transformer.autograd_runs import step_timeline
from tests.transformer.fake_blocks import block_run
from tests.transformer.moe_models import moe_spec
from tests.transformer.saved_by_autograd import PRECISIONS, assert_saved_as_is_said
from zeroplan.comparison import cpu_bytes
from zeroplan.ledger import Line
from zeroplan.spec.batch import BatchSpec
from zeroplan.spec.model import ModelSpec
from zeroplan.transformer.activations import block_pass
from zeroplan.transformer.blocks import BlockPass, Compute
from zeroplan.transformer.families.tags import SCRATCH
from zeroplan.transformer.head import head_pass

pytestmark = pytest.mark.torch

#: A family, and whether queries are made by a low-rank product.
MODELS = {
    "qwen3_moe": ("qwen3_moe", True),
    "deepseek_v3": ("deepseek_v3", True),
    "deepseek_v3, whole queries": ("deepseek_v3", False),
}
#: (micro-batch, tokens, heads, key/value heads, head_dim, MLP width, vocabulary, hidden width), as in test_activations.
SHAPES = {
    "grouped heads": (2, 40, 4, 2, 16, 176, 104, 72),
    "one sequence": (1, 33, 6, 3, 8, 96, 136, 72),
    "three sequences": (3, 24, 4, 1, 32, 136, 64, 120),
}
PEAKS = {
    "many tokens": (4, 128, 4, 4, 32, 344, 104, 128),
    "few tokens": (1, 8, 8, 2, 32, 512, 104, 256),
    "long, narrow": (1, 200, 8, 8, 16, 256, 64, 128),
}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("shape", SHAPES)
def test_saved_tensors_are_those_of_autograd(model: str, precision: str, attention: str, shape: str) -> None:
    assert_saved_as_is_said(*_case(model, precision, attention, SHAPES[shape]))


@pytest.mark.parametrize(
    ("model", "precision", "attention", "shape"), combined(MODELS, ("bf16", "fp32"), ("sdpa", "eager"), PEAKS, together=3)
)
def test_backward_of_a_block_peaks_at_one_of_its_points(model: str, precision: str, attention: str, shape: str) -> None:
    spec, compute, batch = _case(model, precision, attention, PEAKS[shape])
    timeline = step_timeline(spec, compute, batch)
    block, head = block_pass(spec, "moe", compute, batch), head_pass(spec, compute, batch)
    assert isinstance(head.hidden_bytes, int)
    at_start = cpu_bytes(block.saved, compute) + head.hidden_bytes
    measured = timeline.peak_bytes("backward 1", "backward 1 end") - timeline.live_bytes("backward 1") + at_start
    assert _highest(block, compute) == pytest.approx(measured, rel=5e-4)


@pytest.mark.parametrize(
    ("model", "attention", "recompute", "precision", "shape"),
    combined(
        ("mixtral", *MODELS), ("sdpa", "eager"), (False, True), ("bf16", "fp32"), ("few tokens", "long, narrow"), together=3
    ),
)
def test_blocks_on_a_gpu_peak_where_they_say(
    model: str, precision: str, attention: str, *, recompute: bool, shape: str
) -> None:
    """CUDA's kernels on fake tensors: the memory-efficient one for queries and values of two widths."""
    spec, compute, batch = _case(model, precision, attention, (SHAPES | PEAKS)[shape])
    compute = compute._replace(kernels="cuda")
    run = block_run(spec, compute, batch, recompute=recompute)
    block = block_pass(spec, "moe", compute, batch, recomputed=recompute)
    kept = _on_fakes(block.checkpoint if recompute else block.saved)
    assert abs(kept - run.kept) <= RANDOM_STATE
    hidden = head_pass(spec, compute, batch).hidden_bytes
    assert isinstance(hidden, int)
    highest = max(_on_fakes(point.lines) + compute.element_bytes * point.gradients for point in block.points)
    beside = _on_fakes(block.checkpoint_in_backward) if recompute else 0
    assert highest + beside == pytest.approx(run.backward + kept + hidden, abs=2 * RANDOM_STATE)
    if not recompute and shape != "few tokens":
        assert _on_fakes(block.saved + block.forward) == pytest.approx(run.forward + hidden, abs=2 * RANDOM_STATE)


#: Two numbers that the attention kernels save of the random-number generator, of 8 bytes or 16 and 8.
RANDOM_STATE = 24


def _on_fakes(lines: tuple[Line, ...]) -> int:
    """Sum the lines without the scratch of kernels."""
    return sum(int(line.n_bytes) for line in lines if line.tag != SCRATCH)


def _highest(block: BlockPass, compute: Compute) -> int:
    """Return the peak of a plain training loop, where weight gradients stay. [bytes]"""
    return max(cpu_bytes(point.lines, compute) + compute.element_bytes * point.gradients for point in block.points)


def _case(model: str, precision: str, attention: str, shape: tuple[int, ...]) -> tuple[ModelSpec, Compute, BatchSpec]:
    family, latent_queries = MODELS.get(model, (model, True))
    assert attention in ("sdpa", "eager")
    compute = Compute(*PRECISIONS[precision], attention, kernels="cpu")
    return (
        moe_spec(family, shape, latent_queries=latent_queries),
        compute,
        BatchSpec(micro_batch_size=shape[0], seq_len=shape[1]),
    )


@pytest.mark.parametrize("model", MODELS)
def test_the_last_point_has_made_every_gradient_of_the_block(model: str) -> None:
    spec, compute, batch = _case(model, "bf16", "sdpa", SHAPES["grouped heads"])
    block = causal_model(spec, compute).get_decoder().layers[0]
    elements = sum(parameter.numel() for parameter in block.parameters())
    assert block_pass(spec, "moe", compute, batch).points[-1].gradients == elements
