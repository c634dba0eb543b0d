"""Megatron-Core's optimizer in host memory: what stays on the GPU is what HybridDeviceOptimizer leaves there."""

from __future__ import annotations

import pytest

from tests.engines.test_megatron import asked
from tests.formulas import assert_explained, assert_symbols_mean_one_thing
from zeroplan.errors import SpecError
from zeroplan.estimator import Estimate, estimate
from zeroplan.ledger import Kind
from zeroplan.spec.recipe import MegatronOptions


def offloaded(fraction: float, **options: object) -> Estimate:
    own = MegatronOptions(use_precision_aware_optimizer=True, optimizer_offload_fraction=fraction, **options)
    return estimate(asked(mesh={"dp_shard": 4, "tp": 2}, megatron=own, attention="eager"))


def per_updated(answer: Estimate) -> tuple[float, float, float]:
    """Return bytes per parameter that this rank updates: of states and of the step on the GPU, and in host memory."""
    states = answer.states_by_kind
    updated = states[Kind.PARAMETERS] // 2 / 4
    step = sum(line.n_bytes for line in answer.engine_moments[-1].lines if line.kind is Kind.OPTIMIZER_TEMPORARY)
    return states.get(Kind.OPTIMIZER_STATE, 0) / updated, step / updated, answer.host_bytes / updated


def test_weights_and_moments_in_host_memory_are_in_fp32_as_are_those_left_on_the_gpu() -> None:
    plain, half, all_away = (per_updated(offloaded(fraction)) for fraction in (0.0, 0.5, 1.0))
    assert plain == (pytest.approx(2 + 8, rel=1e-6), 0, 0)
    assert half[0] == pytest.approx(12 / 2, rel=1e-6)
    assert half[2] == pytest.approx(16 / 2, rel=1e-6)
    assert all_away[0] == 0
    assert all_away[2] == pytest.approx(16, rel=1e-6)
    assert per_updated(offloaded(0.5, exp_avg_dtype="bf16", exp_avg_sq_dtype="bf16"))[0] == half[0]


def test_the_largest_tensor_that_comes_back_is_converted_on_the_gpu() -> None:
    """The table of 50257 x 512, padded and split in two, is more than a quarter of the rank's parameters."""
    answer = offloaded(1.0)
    updated = answer.states_by_kind[Kind.PARAMETERS] // 2 / 4
    assert per_updated(answer)[1] == pytest.approx(4 * min(1.0, 50432 * 512 / 2 / updated), rel=1e-3)


def test_every_line_is_explained() -> None:
    answer = offloaded(0.65)
    assert_explained(answer)
    assert_symbols_mean_one_thing(answer)


@pytest.mark.torch
@pytest.mark.parametrize("fraction", [0.0, 0.3, 0.65, 1.0])
def test_what_stays_on_the_gpu_is_at_most_what_is_counted(fraction: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron-Core divides parameters on fake GPUs: whole tensors move to the host until the fraction is reached."""
    torch = pytest.importorskip("torch")
    hybrid = pytest.importorskip("megatron.core.optimizer.cpu_offloading.hybrid_optimizer", reason="needs Megatron-Core")
    from torch._subclasses.fake_tensor import FakeTensorMode

    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    sizes = (1000, 300, 300, 700, 50)
    with FakeTensorMode():
        optimizer = object.__new__(hybrid.HybridDeviceOptimizer)
        optimizer.param_update_in_fp32 = True
        weights = [torch.nn.Parameter(torch.empty(size, dtype=torch.bfloat16, device="cuda")) for size in sizes]
        optimizer.param_groups = [{"params": weights}]
        away, stays, *_ = optimizer._get_sub_optimizer_param_groups(fraction)
    theirs = [one for group in stays for one in group["params"]]
    assert all(one.dtype == torch.float32 for group in (*away, *stays) for one in group["params"])
    left = sum(one.numel() for one in theirs) / sum(sizes)
    assert left <= 1 - fraction
    assert left == 1 - fraction or fraction not in (0.0, 1.0)


def test_what_is_not_modelled_is_refused() -> None:
    with pytest.raises(SpecError, match=r"needs megatron\.use_precision_aware_optimizer=true"):
        MegatronOptions(optimizer_offload_fraction=0.5)
    with pytest.raises(SpecError, match="0 to 1"):
        MegatronOptions(use_precision_aware_optimizer=True, optimizer_offload_fraction=1.5)
