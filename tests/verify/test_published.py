"""Peaks that others measured on GPUs, against their own setups run here without one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from zeroplan.ledger import Phase
from zeroplan.units import GIB, MB, MIB

if TYPE_CHECKING:
    from zeroplan.verify.recording import Recording

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = pytest.mark.torch

#: github.com/pytorch/torchtitan/pull/165: peak active bytes in per cent of the card's, Llama 2 7B on 8 H100, FSDP2.
TORCHTITAN, CARD = {"full": 23.92, "selective": 52.13}, 95.0396 * GIB
#: aten/src/ATen/cuda/CublasHandlePool.cpp, getChosenWorkspaceSize, compute capability 9.
CUBLAS_ON_H100 = 32 * MIB


def shown_peaks(recording: Recording, *, workspace_bytes: int) -> dict[tuple[int, Phase], int]:
    """Return the most that ``memory_allocated`` would have shown in each phase of each step. [bytes]"""
    from zeroplan.verify.replay import replay

    shown = replay(recording, workspace_bytes=workspace_bytes).allocated
    ends = [span.start for span in recording.spans[1:]] + [recording.now]
    peaks: dict[tuple[int, Phase], int] = {}
    for span, end in zip(recording.spans, ends, strict=True):
        key = span.step, span.phase
        peaks[key] = max(peaks.get(key, 0), *shown[span.start : end + 1])
    return peaks


@pytest.mark.parametrize("recompute", TORCHTITAN)
def test_llama_7b_under_fsdp2_takes_what_torchtitan_measured(recompute: str):
    """To the last digit that was printed, which is 10 MiB.

    The peak is in the loss's backward. Requests alone are 22.62 GiB and 49.44 GiB; cuBLAS and what the allocator does not split off
    make up the rest. Nothing of torch's own changes since March 2024, and no kernel's scratch, is alive then.
    """
    from tests.verify.published_cases import torchtitan

    peaks = shown_peaks(torchtitan(recompute), workspace_bytes=CUBLAS_ON_H100)
    second = max((key for key in peaks if key[0] == 1), key=lambda key: peaks[key])
    assert second == (1, Phase.BACKWARD)
    assert round(100 * peaks[second] / CARD, 2) == TORCHTITAN[recompute]


#: docs.pytorch.org/tutorials/recipes/zero_redundancy_optimizer: max_memory_allocated in whole MB (1e6), torch 1.8, two GPUs.
BEFORE_THE_STEP, WITH_ADAM, WITH_ZERO = 992, 1697, 1361
WEIGHT = 16 * MIB
"""What a weight of 2000 x 2000 in fp32 counts: a segment of its own, whose rest below 1 MiB is not split off."""


def test_twenty_layers_under_ddp_take_what_the_recipe_printed():
    """To the MB. At that time cuBLAS had its workspace not from torch."""
    from tests.verify.published_cases import zero_recipe

    peaks = shown_peaks(zero_recipe(zero_stage=0), workspace_bytes=0)
    assert peaks[0, Phase.BACKWARD] // MB == BEFORE_THE_STEP
    assert peaks[0, Phase.STEP] // MB == WITH_ADAM


def test_twenty_layers_under_zero_1_take_what_the_recipe_printed():
    """To the MB, less one weight: torch sorts parameters before it shares them out, torch 1.8 did not.

    A rank's weights are therefore updated one after another, where biases came between them, and Adam's denominator of the last
    one is still held when the next is made.
    """
    from tests.verify.published_cases import zero_recipe

    peaks = shown_peaks(zero_recipe(zero_stage=1), workspace_bytes=0)
    assert peaks[0, Phase.BACKWARD] // MB == BEFORE_THE_STEP
    assert (peaks[0, Phase.STEP] - WEIGHT) // MB == WITH_ZERO
