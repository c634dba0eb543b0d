"""Engine megatron compared with SimuMax's runs of Megatron-LM on B200. Nothing in the engine was fitted to them."""

from __future__ import annotations

from statistics import median

from tests.measured.megatron_b200 import score


def test_peaks_are_within_a_half_percent() -> None:
    """Llama's estimates are within 0.1 %. With experts they are up to 0.55 % off; those runs fused the permutation."""
    found = score()
    dense = [one.peak for one in found if not one.run.experts]
    experts = [one.peak for one in found if one.run.experts]
    assert len(dense) == 18
    assert len(experts) == 8
    assert median(map(abs, dense)) < 0.0005
    assert max(map(abs, dense)) < 0.001
    assert max(map(abs, experts)) < 0.0055
