"""Which optimizers can step FSDP2's DTensors: those that are refused raise in torch, the others do not."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.engines.data_parallel import process_group
from zeroplan import RecipeSpec, SpecError, estimate, job
from zeroplan.engines.optimizers import IMPLEMENTATIONS, RAISES_ON_DTENSORS, implementation_of

if TYPE_CHECKING:
    from zeroplan.spec.recipe import Optimizer, OptimizerImpl

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

_BY_TORCH = ("adamw", "adam", "sgd", "sgd-momentum", "adagrad", "rmsprop", "adafactor")
STEPS = [(optimizer, impl) for optimizer in _BY_TORCH for impl in IMPLEMENTATIONS[optimizer]]


def step(make: object) -> None:
    """Take two steps of a small module under ``fully_shard``."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    with process_group(2):
        mesh = init_device_mesh("cpu", (2,))
        module = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.LayerNorm(128), torch.nn.Linear(128, 64, bias=False))
        fully_shard(module, mesh=mesh)
        optimizer = make(module.parameters())  # type: ignore[operator]
        for _ in range(2):
            module(torch.randn(4, 64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize(("optimizer", "impl"), STEPS)
def test_an_optimizer_of_torch_raises_exactly_if_it_is_refused(optimizer: Optimizer, impl: OptimizerImpl):
    from zeroplan.verify.training.optimizers import _OPTIMIZERS

    cls, arguments = _OPTIMIZERS[optimizer]
    how = {"fused": True} if impl == "fused" else {"foreach": impl == "foreach"}
    if (optimizer, impl) not in RAISES_ON_DTENSORS:
        step(lambda parameters: cls(parameters, **arguments, **how))
        return
    with pytest.raises((RuntimeError, NotImplementedError), match=r"sharding strategy|in-place operations"):
        step(lambda parameters: cls(parameters, **arguments, **how))


@pytest.mark.parametrize(("name", "bits"), [("AdamW", 8), ("Lion", 8), ("Lion", 32)])
def test_optimizers_of_bitsandbytes_raise(name: str, bits: int):
    bitsandbytes = pytest.importorskip("bitsandbytes")
    said = r"mixed torch.Tensor and DTensor" if bits == 8 else "does not have a sharding strategy"
    with pytest.raises((RuntimeError, NotImplementedError), match=said):
        step(lambda parameters: getattr(bitsandbytes.optim, name)(parameters, optim_bits=bits, min_8bit_size=16))


@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW4bit", "AdamWFp8", "_AdamW"])
def test_optimizers_of_torchao_do_not_raise(name: str, monkeypatch: pytest.MonkeyPatch):
    torchao = pytest.importorskip("torchao.optim")
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    step(getattr(torchao, name))


@pytest.mark.parametrize(("optimizer", "impl"), sorted(RAISES_ON_DTENSORS))
def test_run_and_estimate_refuse_with_the_same_line(optimizer: Optimizer, impl: OptimizerImpl):
    from tests.simulated import simulate

    asked = job(model="smollm2-135m", gpus=2, stage=3, optimizer=optimizer, optimizer_impl=impl, seq_len=16)
    said = []
    for ask in (estimate, simulate):
        with pytest.raises(SpecError, match=rf"{optimizer}' \({impl}\) fails under engine 'fsdp2': .*; use ") as refused:
            ask(asked)
        said.append(str(refused.value))
    assert said[0] == said[1]
    assert "\n" not in said[0]
    assert implementation_of(RecipeSpec(engine="ddp", zero_stage=0, optimizer=optimizer, optimizer_impl=impl)) == impl
