"""Runs a small model on fake tensors of the fake GPU and reports what is alive at named moments, to the byte."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.causal_models import causal_model  # noqa: E402
from tests.simulated import on_the_fake_gpu  # noqa: E402
from zeroplan.verify.fake_cuda.fake_tensors import fake_tensors  # noqa: E402
from zeroplan.verify.fake_cuda.installed import CUDA, install_node  # noqa: E402
from zeroplan.verify.watching.timeline import Timeline  # noqa: E402
from zeroplan.verify.watching.tracker import Tracker  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable

    from zeroplan.spec.batch import BatchSpec
    from zeroplan.spec.model import ModelSpec
    from zeroplan.transformer.blocks import Compute


class BlockRun(NamedTuple):
    """The bytes of a middle block, without weights: what it keeps, and how much its highest moments need beyond that."""

    kept: int
    """From the end of its forward on."""
    forward: int
    """Highest moment of its forward, beyond what was alive before it."""
    backward: int
    """Highest moment of its backward, beyond what was alive when it began."""


class Passage(torch.autograd.Function):
    """Reports when the gradient arrives."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, hidden: torch.Tensor, say: Callable[[], None]) -> torch.Tensor:
        ctx.say = say
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.say()
        return gradient, None


def passed(output: object, say: Callable[[], None]) -> object:
    """Pass what a block returns through ``Passage``; Falcon's block returns a tuple that begins with the hidden states."""
    if isinstance(output, tuple):
        return (Passage.apply(output[0], say), *output[1:])
    return Passage.apply(output, say)


def block_run(spec: ModelSpec, compute: Compute, batch: BatchSpec, *, recompute: bool = False, block: int = 1) -> BlockRun:
    """Run forward and backward once, without autocast, and measure a block that is neither the first nor the last."""
    return on_the_fake_gpu(_block_run, spec, compute, batch, recompute=recompute, number=block)


def _block_run(spec: ModelSpec, compute: Compute, batch: BatchSpec, *, recompute: bool, number: int) -> BlockRun:
    install_node()
    tracker, at = Tracker(device=CUDA), dict[str, int]()

    def say(name: str) -> Callable[[], None]:
        return lambda: at.__setitem__(name, tracker.now)

    with fake_tensors(tracker, CUDA), torch.device(CUDA), tracker:
        model = causal_model(spec, compute, layers=number + 2).to(CUDA)
        model = model if spec.adapter is None else model.get_base_model()
        if recompute:
            model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
        decoder = model.get_decoder()
        for index, block in enumerate(decoder.h if hasattr(decoder, "h") else decoder.layers):
            block.register_forward_pre_hook(_before(say, index))
            block.register_forward_hook(_after(say, index))
        ids = torch.randint(0, spec.vocab_size, (batch.micro_batch_size, batch.seq_len))
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        recording = tracker.recording
        live = Timeline(recording).live
    begun, backward_begun = live[at[f"forward {number}"]], live[at[f"backward {number}"]]
    kept = live[at[f"forward {number + 1}"]] - begun
    forward = max(live[at[f"forward {number}"] : at[f"forward {number} end"] + 1]) - begun
    backward = max(live[at[f"backward {number}"] : at[f"backward {number} end"] + 1]) - backward_begun
    return BlockRun(kept, forward, backward)


def _before(say: Callable[[str], Callable[[], None]], index: int) -> Callable[..., object]:
    def hook(_block: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        say(f"forward {index}")()
        return (Passage.apply(inputs[0], say(f"backward {index} end")), *inputs[1:])

    return hook


def _after(say: Callable[[str], Callable[[], None]], index: int) -> Callable[..., object]:
    def hook(_block: torch.nn.Module, _inputs: tuple[torch.Tensor, ...], output: object) -> object:
        say(f"forward {index} end")()
        return passed(output, say(f"backward {index}"))

    return hook
