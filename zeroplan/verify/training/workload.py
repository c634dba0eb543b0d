"""What is trained: a module, an example batch, and where its output holds the loss.

Of a job it is the causal language model of transformers (:mod:`zeroplan.verify.training.causal_model`) with transformers' own loss.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from zeroplan.errors import MeasurementError
from zeroplan.spec.job import JobSpec
from zeroplan.spec.recipe import RecipeSpec
from zeroplan.verify.training.activations_away import offload_blocks
from zeroplan.verify.training.causal_model import causal_module
from zeroplan.verify.training.losses import chunked_loss
from zeroplan.verify.training.modules import find_blocks


class Workload(NamedTuple):
    """A module, the keyword arguments of one forward pass, and the loss in what it returns.

    ``blocks`` are the parts that engines wrap one by one, in order; ``loss_goes_backward`` says that the loss itself begins the
    backward pass. ``forward`` calls the module where it does not take the batch as keywords; ``held`` gives what the training
    loop holds of the output and of what it made of it, where that is not all of the output.
    """

    module: nn.Module
    batch: Mapping[str, torch.Tensor]
    loss: Callable[[object], torch.Tensor]
    blocks: tuple[nn.Module, ...] = ()
    loss_goes_backward: bool = False
    forward: Callable[[Mapping[str, torch.Tensor]], object] | None = None
    held: Callable[[], Sequence[torch.Tensor]] | None = None


def workload(job: JobSpec, *, dtype: torch.dtype, device: str = "cpu", batch_device: str | None = None) -> Workload:
    """Build the causal language model of a job, its weights in ``dtype``, and one micro-batch of token ids.

    Under a fake tensor mode everything it builds is fake. The batch may be elsewhere, where the weights have no memory yet.
    """
    _refuse_what_cannot_run(job.recipe)
    module = causal_module(job.model, job.recipe, dtype, device)
    if job.recipe.offload_activations:
        offload_blocks(module, find_blocks(module))
    shape = (job.batch.micro_batch_size, job.batch.seq_len)
    with torch.device(batch_device or device):
        ids = torch.randint(0, job.model.vocab_size, shape)
        if job.recipe.loss == "chunked":
            labels = torch.randint(0, job.model.vocab_size, shape)
            loss = chunked_loss(module, labels)
            return Workload(module, {"input_ids": ids}, loss, find_blocks(module), loss_goes_backward=True)
    return Workload(module, {"input_ids": ids, "labels": ids}, loss_of_output, find_blocks(module))


def placed(make: Callable[[], Workload], device: str) -> Workload:
    """Build a workload on the device, wherever it does not say otherwise, and hand it its batch there."""
    with torch.device(device):
        work = make()
    tensors = (*work.module.parameters(), *work.module.buffers(), *work.batch.values())
    if not all(isinstance(tensor, FakeTensor) for tensor in tensors):
        raise MeasurementError(
            "the workload has real tensors, made before the simulation began; make all of them inside the function"
        )
    return work._replace(batch={name: tensor.to(device) for name, tensor in work.batch.items()})


def with_weights(made: Workload) -> Workload:
    """Numbers instead of what the allocator left: denormal and infinite ones would cost time, or make an engine skip steps."""
    with torch.no_grad():
        for parameter in made.module.parameters():
            if parameter.is_floating_point():
                parameter.normal_(0, 0.02)
    return made


def _refuse_what_cannot_run(recipe: RecipeSpec) -> None:
    if recipe.attention == "flash":
        raise MeasurementError("attention 'flash' runs on GPUs only; verify sdpa or eager")
    if recipe.loss == "fused":
        raise MeasurementError("loss 'fused' is Liger's kernel and runs on GPUs only; use full or chunked, or --workload")
    if recipe.loss == "chunked" and recipe.engine != "fsdp2":
        raise MeasurementError("loss 'chunked' goes backward before the engine knows; it runs under fsdp2 only")


def store_as(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast the parameters, and leave buffers as they are."""
    for parameter in module.parameters():
        if parameter.is_floating_point() and parameter.dtype != dtype:
            parameter.data = parameter.data.to(dtype)


def in_16_bits(batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A batch as a module takes it whose weights are in 16 bits: its numbers cast, its whole numbers not."""
    return {name: one.bfloat16() if one.is_floating_point() else one for name, one in batch.items()}


def loss_of_output(output: object) -> torch.Tensor:
    """Find the loss as transformers' models return it."""
    loss = getattr(output, "loss", None)
    if not isinstance(loss, torch.Tensor):
        raise MeasurementError("the model returned no loss; it needs labels")
    return loss
