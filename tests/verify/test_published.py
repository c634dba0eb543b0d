"""Peaks that others measured on GPUs, against their own setups run here without one."""

from __future__ import annotations

import pytest

from zeroplan.ledger import Phase
from zeroplan.units import GIB, MB, MIB

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = pytest.mark.torch

#: github.com/pytorch/torchtitan/pull/165: peak active bytes in per cent of 95.0396 GiB, Llama 2 7B on 8 H100, FSDP2.
TORCHTITAN = {"full": 0.2392 * 95.0396 * GIB, "selective": 0.5213 * 95.0396 * GIB}
#: One of 32 MiB per thread and stream that multiplies matrices, forward's and autograd's
#: (aten/src/ATen/cuda/CublasHandlePool.cpp, getChosenWorkspaceSize, compute capability 9).
CUBLAS_ON_H100 = 2 * 32 * MIB


@pytest.mark.parametrize("recompute", TORCHTITAN)
def test_llama_7b_under_fsdp2_takes_what_torchtitan_measured(recompute: str):
    """It runs at 0.2 % (full) and 0.1 % (selective) less than was measured.

    What is missing, 30 to 45 MiB, is alike in both; the published percentages are rounded to 5 MiB. The peak is in the loss's
    backward, where neither the engine's version nor any kernel's scratch matters; the limit says that no other tensor of the
    size of an activation (128 MiB) is missing or too much.
    """
    from tests.verify.published_cases import counted_peaks, torchtitan

    peaks = counted_peaks(torchtitan(recompute))
    second = max((key for key in peaks if key[0] == 1), key=lambda key: peaks[key])
    assert second == (1, Phase.BACKWARD)
    assert abs(peaks[second] + CUBLAS_ON_H100 - TORCHTITAN[recompute]) < 64 * MIB


#: docs.pytorch.org/tutorials/recipes/zero_redundancy_optimizer: max_memory_allocated in whole MB (1e6), torch 1.8, two GPUs.
MODEL_AND_BUCKETS, BEFORE_THE_STEP, WITH_ADAM, WITH_ZERO = 656, 992, 1697, 1361
WEIGHT = 16 * MIB
"""What a weight of 2000 x 2000 in fp32 counts: a segment of its own, whose rest below 1 MiB is not split off."""


def test_twenty_layers_under_ddp_take_what_the_recipe_printed():
    """To the MB, where the buffers of DDP's first broadcast leave no segments for gradients to reuse; else 0.9 % less."""
    from tests.verify.published_cases import counted_peaks, zero_recipe

    tracker = zero_recipe(zero_stage=0)
    as_run, fresh = counted_peaks(tracker), counted_peaks(tracker, leftovers=False)
    assert as_run[-1, Phase.INIT] // MB == MODEL_AND_BUCKETS
    assert fresh[0, Phase.BACKWARD] // MB == BEFORE_THE_STEP
    assert fresh[0, Phase.STEP] // MB == WITH_ADAM
    assert -0.01 < as_run[0, Phase.STEP] / (WITH_ADAM * MB) - 1 < 0


def test_twenty_layers_under_zero_1_take_what_the_recipe_printed():
    """To the MB, less one weight: torch sorts parameters before it shares them out, torch 1.8 did not.

    A rank's weights are therefore updated one after another, where biases came between them, and Adam's denominator of the last
    one is still held when the next is made.
    """
    from tests.verify.published_cases import counted_peaks, zero_recipe

    tracker = zero_recipe(zero_stage=1)
    as_run, fresh = counted_peaks(tracker), counted_peaks(tracker, leftovers=False)
    assert fresh[0, Phase.BACKWARD] // MB == BEFORE_THE_STEP
    assert (fresh[0, Phase.STEP] - WEIGHT) // MB == WITH_ZERO
    assert abs(as_run[0, Phase.STEP] / (WITH_ZERO * MB) - 1) < 0.01
