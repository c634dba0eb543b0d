"""Optimizer states and temporaries of the step against torch's own optimizers, to the byte."""

from __future__ import annotations

import math
from typing import get_args

import pytest

from zeroplan.engines.optimizers import IMPLEMENTATIONS, LocalTensor, state_lines, step_temporary_lines
from zeroplan.engines.published_optimizers import PUBLISHED
from zeroplan.ledger import total_bytes
from zeroplan.spec.recipe import Optimizer, OptimizerImpl

torch = pytest.importorskip("torch")

from zeroplan.verify.watching.allocations import mark, recorded  # noqa: E402  it imports torch

pytestmark = pytest.mark.torch

Tensors = tuple[LocalTensor, ...]

# Shapes in the order of a parameter group, chosen so that small errors show.
SHAPES: dict[str, Tensors] = {
    "embedding first": (
        LocalTensor((300, 24), in_block=False),
        LocalTensor((24, 24), 3),
        LocalTensor((8, 24), 3),
        LocalTensor((24,), 3),
        LocalTensor((72, 24), 3),
        LocalTensor((24,), in_block=False),
    ),
    "head largest, last": (
        LocalTensor((40, 32), in_block=False),
        LocalTensor((96, 32), 2),
        LocalTensor((32, 96), 2),
        LocalTensor((32,), in_block=False),
        LocalTensor((500, 32), in_block=False),
    ),
    "blocks only": (LocalTensor((48, 96), 4), LocalTensor((96, 40), 4), LocalTensor((64, 64), 4)),
    "expert stack": (LocalTensor((64,)), LocalTensor((4, 16, 24)), LocalTensor((4, 24, 8))),
}
CASES = [(optimizer, impl) for optimizer, impls in IMPLEMENTATIONS.items() for impl in impls if optimizer not in PUBLISHED]

# Bytes of scalars that torch makes beside the temporaries: the wrapped step count (8), a norm (4).
SCALARS = 12


class Lion(torch.optim.Optimizer):
    """Lion as in Chen et al. 2023, algorithm 2: a for-loop in which each expression makes a tensor."""

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self) -> None:
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                state["exp_avg"] = torch.zeros_like(parameter)
            direction = state["exp_avg"] * 0.9 + parameter.grad * 0.1
            parameter.add_(direction.sign_(), alpha=-1e-4)
            state["exp_avg"].mul_(0.99).add_(parameter.grad, alpha=0.01)


@pytest.fixture(params=list(SHAPES))
def tensors(request: pytest.FixtureRequest) -> Tensors:
    return SHAPES[request.param]


@pytest.fixture(params=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return getattr(torch, request.param)


def written_out(tensors: Tensors) -> list[LocalTensor]:
    """Return every tensor of the parameter group, block after block."""
    every: list[LocalTensor] = []
    index = 0
    while index < len(tensors):
        repeat = tensors[index].repeat
        end = index + 1
        while repeat > 1 and end < len(tensors) and tensors[end].repeat == repeat:
            end += 1
        every += tensors[index:end] * repeat
        index = end
    return every


def parameters_of(tensors: Tensors, dtype: torch.dtype) -> list[torch.nn.Parameter]:
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(*tensor.shape).to(dtype)) for tensor in written_out(tensors)]


def build(optimizer: Optimizer, impl: OptimizerImpl, tensors: Tensors, dtype: torch.dtype) -> list[torch.optim.Optimizer]:
    """Build what a user would: one optimizer, or Muon for the blocks' matrices and AdamW for all else."""
    parameters = parameters_of(tensors, dtype)
    if optimizer == "muon":
        by_muon = [tensor.in_block and len(tensor.shape) == 2 for tensor in written_out(tensors)]
        matrices = [parameter for parameter, muon in zip(parameters, by_muon, strict=True) if muon]
        others = [parameter for parameter, muon in zip(parameters, by_muon, strict=True) if not muon]
        both = [torch.optim.Muon(matrices)] if matrices else []
        return both + ([torch.optim.AdamW(others, foreach=True)] if others else [])
    return [_one(optimizer, impl, parameters)]


def _one(optimizer: Optimizer, impl: OptimizerImpl, parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    flags = {"fused": True} if impl == "fused" else {"foreach": impl == "foreach"}
    make = {
        "adamw": lambda: torch.optim.AdamW(parameters, **flags),
        "adam": lambda: torch.optim.Adam(parameters, **flags),
        "sgd": lambda: torch.optim.SGD(parameters, lr=0.1, **flags),
        "sgd-momentum": lambda: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, **flags),
        "adagrad": lambda: torch.optim.Adagrad(parameters, **flags),
        "rmsprop": lambda: torch.optim.RMSprop(parameters, **flags),
        "adafactor": lambda: torch.optim.Adafactor(parameters, **flags),
        "lion": lambda: Lion(parameters),
    }
    return make[optimizer]()


def measured_peak(stepper: torch.optim.Optimizer) -> int:
    """Return the most bytes alive during one step, beyond those before it."""
    for parameter in stepper.param_groups[0]["params"]:
        parameter.grad = torch.randn_like(parameter)
    with recorded() as timeline:
        mark("start")
        stepper.step()
        mark("end")
    return timeline.peak_bytes("start", "end")


@pytest.mark.parametrize(("optimizer", "impl"), CASES)
def test_states_are_those_of_torch(optimizer: Optimizer, impl: OptimizerImpl, tensors: Tensors, dtype: torch.dtype) -> None:
    steppers = build(optimizer, impl, tensors, dtype)
    for stepper in steppers:
        measured_peak(stepper)
    on_gpu = impl == "fused"
    held = [
        value.numel() * value.element_size()
        for stepper in steppers
        for state in stepper.state.values()
        for name, value in state.items()
        if value is not None and (name != "step" or on_gpu)
    ]
    assert total_bytes(state_lines(optimizer, impl, tensors, dtype.itemsize)) == sum(held)


def adafactor_extra(tensors: Tensors, dtype: torch.dtype) -> int:
    """Return the bytes that Adafactor's means take beside its temporaries.

    They are one number per matrix of a stack. For the mean of bf16 rows, torch's CPU kernel also makes an fp32 copy of them and of
    the result, while CUDA's converts as it reads.
    """
    matrices = [tensor for tensor in tensors if len(tensor.shape) > 1]
    means = dtype.itemsize * sum(tensor.repeat * math.prod(tensor.shape[:-2]) for tensor in matrices)
    if dtype.itemsize == 4:
        return means
    return means + max(4 * math.prod(tensor.shape[:-1]) + 4 * math.prod(tensor.shape[:-2]) for tensor in matrices)


@pytest.mark.parametrize(("optimizer", "impl"), CASES)
def test_temporaries_are_those_of_torch(
    optimizer: Optimizer, impl: OptimizerImpl, tensors: Tensors, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    steppers = build(optimizer, impl, tensors, dtype)
    peak = 0
    for _ in range(3):
        peak = max(measured_peak(stepper) for stepper in steppers)
    predicted = total_bytes(step_temporary_lines(optimizer, impl, tensors, dtype.itemsize))
    extra = adafactor_extra(tensors, dtype) if optimizer == "adafactor" else 0
    assert 0 <= peak - predicted <= SCALARS + extra


def test_the_first_step_takes_the_same_temporaries_beside_its_new_states(dtype: torch.dtype) -> None:
    tensors = SHAPES["embedding first"]
    (stepper,) = build("adamw", "foreach", tensors, dtype)
    lines = state_lines("adamw", "foreach", tensors, dtype.itemsize)
    lines += step_temporary_lines("adamw", "foreach", tensors, dtype.itemsize)
    counters_on_the_host = 4 * len(written_out(tensors))
    assert 0 <= measured_peak(stepper) - total_bytes(lines) - counters_on_the_host <= SCALARS


@pytest.mark.parametrize("optimizer", ["adafactor", "muon", "rmsprop"])
def test_torch_has_no_implementation_that_we_refuse(optimizer: Optimizer) -> None:
    classes = {"adafactor": torch.optim.Adafactor, "muon": torch.optim.Muon, "rmsprop": torch.optim.RMSprop}
    for impl in set(get_args(OptimizerImpl)) - {*IMPLEMENTATIONS[optimizer], "forloop"}:
        with pytest.raises(TypeError, match=impl):
            classes[optimizer]([torch.nn.Parameter(torch.zeros(2, 2))], **{impl: True})
