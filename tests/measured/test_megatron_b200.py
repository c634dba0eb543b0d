"""SimuMax's runs of Megatron-LM on B200, against engine megatron. Nothing in the engine was fitted to them."""

from __future__ import annotations

from statistics import median

from tests.measured.megatron_b200 import score


def test_peaks_are_within_a_half_percent() -> None:
    """Llama's are within 0.1 %; with experts, whose permutation was fused there, up to 0.5 % too low."""
    found = score()
    dense = [one.peak for one in found if not one.run.experts]
    experts = [one.peak for one in found if one.run.experts]
    assert len(dense) == 18
    assert len(experts) == 8
    assert median(map(abs, dense)) < 0.0005
    assert max(map(abs, dense)) < 0.001
    assert max(map(abs, experts)) < 0.0055
