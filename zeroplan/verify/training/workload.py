"""What is trained: a module, an example batch, and a function that returns the loss of the module's output.

A job's own workload is a causal language model of transformers (:mod:`zeroplan.verify.training.causal_model`) with its own loss.
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
from zeroplan.verify.training.losses import chunked_loss, fuse_kernels, fuse_loss, loss_in_pieces
from zeroplan.verify.training.modules import find_blocks


class Workload(NamedTuple):
    """A module, the keyword arguments of one forward pass, and a function that returns the loss of its output.

    ``blocks`` are the parts that engines wrap, in order; ``loss_goes_backward`` means that the loss itself begins the backward
    pass. ``forward`` calls the module if it does not accept the batch as keywords; ``held`` returns the tensors that the
    training loop holds of the output, if not all. ``holds_inputs``: the loop holds the batch's floating-point tensors through the
    whole step, and a profile counts them there (``Profile.inputs``).
    """

    module: nn.Module
    batch: Mapping[str, torch.Tensor]
    loss: Callable[[object], torch.Tensor]
    blocks: tuple[nn.Module, ...] = ()
    loss_goes_backward: bool = False
    forward: Callable[[Mapping[str, torch.Tensor]], object] | None = None
    held: Callable[[], Sequence[torch.Tensor]] | None = None
    holds_inputs: bool = False


def workload(
    job: JobSpec, *, dtype: torch.dtype, device: str = "cpu", batch_device: str | None = None, on_gpu: bool = False
) -> Workload:
    """The causal language model of a job with weights in ``dtype``, and one micro-batch of token ids.

    Under a fake tensor mode everything is fake. ``batch_device`` differs if the weights are on the meta device. ``on_gpu`` says
    that the run has a GPU, which Liger's loss needs.
    """
    _refuse_what_cannot_run(job.recipe, on_gpu=on_gpu)
    module = causal_module(job.model, job.recipe, dtype, device)
    if job.recipe.loss == "fused":
        fuse_loss(module)
    if job.recipe.fused_parts:
        fuse_kernels(module, job.recipe.fused_parts)
    if job.recipe.offload_activations:
        offload_blocks(module, find_blocks(module))
    shape = (job.batch.micro_batch_size, job.batch.seq_len)
    with torch.device(batch_device or device):
        ids = torch.randint(0, job.model.vocab_size, shape)
        inputs = {"input_ids": ids, **({"attention_mask": mask_of_padding(ids)} if job.recipe.padded else {})}
        if job.recipe.loss == "chunked":
            if job.model.vision is not None:
                raise MeasurementError("loss 'chunked' with images is not run; use loss 'full'")
            labels = torch.randint(0, job.model.vocab_size, shape)
            loss = chunked_loss(module, labels)
            return Workload(module, inputs, loss, find_blocks(module), loss_goes_backward=True)
        if "loss-in-pieces" in job.recipe.fused_parts:
            labels = torch.randint(0, job.model.vocab_size, shape)
            return Workload(module, inputs, loss_in_pieces(module, labels), find_blocks(module))
        if job.model.vision is not None:
            from zeroplan.verify.training import vision  # noqa: PLC0415  few models have images

            more = vision.images(module, job.model.vision, job.batch)
            return Workload(module, {**inputs, "labels": ids, **more}, loss_of_output, blocks_of(module, job))
    return Workload(module, {**inputs, "labels": ids}, loss_of_output, find_blocks(module))


def mask_of_padding(ids: torch.Tensor) -> torch.Tensor:
    """The mask of a batch whose sequences end in a token of padding, as tokenizers make it."""
    mask = torch.ones_like(ids)
    mask[:, -1] = 0
    return mask


def blocks_of(module: nn.Module, job: JobSpec) -> tuple[nn.Module, ...]:
    """The blocks that engines wrap, in the order in which they run: a vision tower's come before the text's."""
    from zeroplan.verify.training.vision import tower_blocks  # noqa: PLC0415  few models have images

    tower = tower_blocks(module)
    layers = job.model.num_hidden_layers + job.model.cross_layers
    text = [part for part in module.modules() if isinstance(part, nn.ModuleList) and len(part) == layers]
    return (*tower, *next(tuple(part) for part in text if part[0] not in tower))


def placed(make: Callable[[], Workload], device: str) -> Workload:
    """A workload built on the device, with its batch moved there."""
    with torch.device(device):
        work = make()
    tensors = (*work.module.parameters(), *work.module.buffers(), *work.batch.values())
    if not all(isinstance(tensor, FakeTensor) for tensor in tensors):
        raise MeasurementError(
            "the workload has real tensors, made before the simulation; make all tensors inside the function"
        )
    return work._replace(batch={name: tensor.to(device) for name, tensor in work.batch.items()})


def with_weights(made: Workload) -> Workload:
    """Fill the weights with ordinary numbers: denormals would slow the run down, infinities make an engine skip steps."""
    with torch.no_grad():
        for parameter in made.module.parameters():
            if parameter.is_floating_point():
                parameter.normal_(0, 0.02)
    return made


def _refuse_what_cannot_run(recipe: RecipeSpec, *, on_gpu: bool) -> None:
    if recipe.attention == "flash":
        raise MeasurementError("attention 'flash' runs on GPUs only; verify sdpa or eager")
    if recipe.loss == "fused" and not on_gpu:
        raise MeasurementError("loss 'fused' is Liger's kernel and runs on GPUs only; use full or chunked, or --workload")
    if recipe.loss == "log-probs":
        raise MeasurementError(
            "loss 'log-probs' is that of TRL's trainers, which verify does not run; dry-run a script of theirs"
        )
    if recipe.loss == "chunked" and recipe.engine != "fsdp2":
        raise MeasurementError("loss 'chunked' runs its own backward, which only fsdp2 supports; use loss 'full'")
    if recipe.ddp.compiled:
        raise MeasurementError(
            "verify does not compile the model; leave ddp.compiled out, or dry-run a script that compiles it"
        )
    if recipe.inputs_in_flight:
        raise MeasurementError(
            "verify offloads activations without streams of copies; leave inputs_in_flight out, or dry-run torchtune's script"
        )


def store_as(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast the parameters; leave buffers unchanged."""
    for parameter in module.parameters():
        if parameter.is_floating_point() and parameter.dtype != dtype:
            parameter.data = parameter.data.to(dtype)


def in_16_bits(batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A batch for a module with 16-bit weights: floating-point tensors are cast, integers are not."""
    return {name: one.bfloat16() if one.is_floating_point() else one for name, one in batch.items()}


def loss_of_output(output: object) -> torch.Tensor:
    """The loss in a transformers output."""
    loss = getattr(output, "loss", None)
    if not isinstance(loss, torch.Tensor):
        raise MeasurementError("the model returned no loss; add labels to the batch")
    return loss
