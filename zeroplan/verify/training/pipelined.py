"""Trains one pipeline rank: its stages of a transformers model under FSDP2, run by the schedules of torch's pipelining.

Stages are split as torchtitan splits transformers' models: modules of other stages are identities, and every stage makes its own
rotary tables. Ranks with the first stage have token ids, those with the last have labels. Stages get the shapes of their inputs,
so torch runs no extra pass to infer them.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.pipelining import stage as stages
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.parallel import loss_parallel

from zeroplan.errors import MeasurementError
from zeroplan.ledger import Kind, Phase
from zeroplan.spec.job import JobSpec
from zeroplan.spec.pipeline import TORCHS_NAMES, Stage, cut, indices_of_rank, stages_per_rank
from zeroplan.verify.fake_parts.held_sends import Held
from zeroplan.verify.replaced import replaced
from zeroplan.verify.training.activations_away import offload_blocks
from zeroplan.verify.training.adapters import unwrapped
from zeroplan.verify.training.causal_model import causal_module
from zeroplan.verify.training.engine import COMPUTE, Engine, labelled, weights_dtype
from zeroplan.verify.training.experts import dispatched
from zeroplan.verify.training.fsdp2 import allocate, fsdp2_labels, shard
from zeroplan.verify.training.losses import loss_of_hidden
from zeroplan.verify.training.meshes import TENSOR, context_ranks, sharding_ranks
from zeroplan.verify.training.modules import find_blocks
from zeroplan.verify.training.optimizers import make_optimizer, trained
from zeroplan.verify.training.tensor_parallel import split_module
from zeroplan.verify.watching.watcher import Watcher

Schedule = PipelineScheduleSingle | PipelineScheduleMulti


class Pipelined(Engine):
    """FSDP2 around every block and each stage of this rank, run by a schedule of torch's pipelining."""

    handed_on = Kind.UNSHARDED_GRADIENTS
    kept: Kind | None = Kind.GRADIENTS

    def __init__(self, job: JobSpec, mesh: DeviceMesh, watcher: Watcher) -> None:
        self._job, self._watcher = job, watcher
        rank = mesh["pp"].get_local_rank()
        self._stages = _stages_of(job, rank)
        self._context = None if job.mesh.cp == 1 else context_ranks(job, mesh)
        self._cutting: Callable[[], AbstractContextManager[None]] = nullcontext
        self._positions = self._whole_positions(mesh.device_type)
        parts = [_part(job, stage, self._positions) for stage in self._stages]
        self.module = nn.ModuleList(parts)
        watcher.name_modules(parts[0] if len(parts) == 1 else self.module)
        within = sharding_ranks(job, mesh)
        for part in parts:
            if job.mesh.tp > 1:
                split_module(part, find_blocks(part), mesh[TENSOR], along_sequence=job.recipe.fsdp2.sequence_parallel)
            shard(part, find_blocks(part), job.recipe, within, dispatched(job, part, mesh, watcher))
        allocate(self.module, "cpu" if job.recipe.fsdp2.cpu_offload else mesh.device_type)
        watcher.claim(Kind.PARAMETERS, (*self.module.parameters(), *self.module.buffers()))
        self._schedule = _schedule(job, self._stages, parts, mesh)
        self._ids, self._labels = (self._tokens(mesh.device_type, which) for which in ("is_first", "is_last"))
        self.optimizer = make_optimizer(trained(self.module), job.recipe)

    def _tokens(self, device: str, which: str) -> torch.Tensor | None:
        """The ids of all micro-batches of a step, if a stage of this rank reads them; else None."""
        if not any(getattr(stage, which) for stage in self._stages):
            return None
        batch = self._job.batch
        ids = torch.randint(
            0, self._job.model.vocab_size, (batch.grad_accum_steps * batch.micro_batch_size, batch.seq_len), device=device
        )
        self._watcher.claim(Kind.ACTIVATIONS, (ids,))
        return ids

    def micro_step(self, enter: Callable[[Phase], None], *, last: bool) -> None:
        """Run all micro-batches of a step."""
        assert last  # noqa: S101  the schedule runs all of them in one call
        inputs = () if self._ids is None else (self._ids,)
        losses: list[torch.Tensor] | None = None if self._labels is None else []
        split = loss_parallel() if self._job.mesh.tp > 1 else nullcontext()
        enter(Phase.FORWARD)
        with _phases(self._schedule, enter), split, self._shared():
            self._schedule.step(*inputs, target=self._labels, losses=losses, return_outputs=False)

    @contextmanager
    def _shared(self) -> Iterator[None]:
        """Split the step's ids, labels and positions over context-parallel ranks; restore them afterwards.

        Source: torchtitan, 2025-10, train.py, forward_backward_step: one context around the schedule's step.
        """
        if self._context is None:
            yield
            return
        buffers = [one for one in (self._ids, self._labels, self._positions) if one is not None]
        with ExitStack() as shared:
            with self._cutting():
                shared.enter_context(context_parallel(self._context, buffers=buffers, buffer_seq_dims=[1] * len(buffers)))
            yield

    def _whole_positions(self, device: str) -> torch.Tensor | None:
        """The positions of a whole sequence, which this rank's stages share; None without context parallelism."""
        if self._context is None:
            return None
        positions = torch.arange(self._job.batch.seq_len, device=device).unsqueeze(0)
        self._watcher.claim(Kind.ACTIVATIONS, (positions,))
        return positions

    @contextmanager
    def labels(self, watcher: Watcher) -> Iterator[None]:
        """Label buffers by the function that requests them; received tensors count as activations."""
        self._cutting = partial(watcher.labelled, Kind.ACTIVATIONS)
        faked = dist.get_backend().startswith("fake")
        with ExitStack() as stack:
            stack.enter_context(fsdp2_labels(watcher))
            stack.enter_context(labelled(watcher, stages, "_make_tensor_from_meta", Kind.ACTIVATIONS))
            if faked:
                for answer in _unanswered():
                    stack.enter_context(answer)
            yield


def _stages_of(job: JobSpec, rank: int) -> tuple[Stage, ...]:
    schedule = job.recipe.pipeline_schedule or "1f1b"
    each = stages_per_rank(schedule, job.recipe.pipeline_stages_per_rank)
    stages = cut(job.model.num_hidden_layers, job.mesh.pp * each, job.recipe.layers_by_hand)
    return tuple(stages[at] for at in indices_of_rank(schedule, rank=rank, pp=job.mesh.pp, stages=len(stages)))


# --- a stage's part of the module ----------------------------------------------------------------------------------------


def _part(job: JobSpec, stage: Stage, positions: torch.Tensor | None) -> nn.Module:
    """The stage's part of the model on the meta device; its forward maps a plain tensor to a plain tensor."""
    module = causal_module(job.model, job.recipe, weights_dtype(job), "meta")
    whole = unwrapped(module)
    decoder: nn.Module = whole.get_decoder()  # type: ignore[operator]  # a transformers model
    stack = next(name for name, part in decoder.named_children() if isinstance(part, nn.ModuleList))
    setattr(decoder, stack, nn.ModuleList(list(getattr(decoder, stack))[stage.start : stage.stop]))
    if not stage.is_first:
        decoder.set_input_embeddings(nn.Identity())  # type: ignore[operator]
    if not stage.is_last:
        whole.set_output_embeddings(nn.Identity())  # type: ignore[operator]
        setattr(decoder, next(name for name in ("norm", "final_layer_norm") if hasattr(decoder, name)), nn.Identity())
    if job.recipe.offload_activations:
        offload_blocks(whole, find_blocks(whole))
    module.forward = _tensor_to_tensor(whole, decoder, stage, positions, tokens=job.batch.seq_len)
    return module


def _tensor_to_tensor(
    whole: nn.Module, decoder: nn.Module, stage: Stage, shared: torch.Tensor | None, *, tokens: int
) -> Callable[[torch.Tensor], torch.Tensor]:  # fmt: skip
    """A forward of plain tensors; positions are ``shared``, or made anew for all ``tokens`` in every pass."""
    run: Callable[..., object] = whole.forward if stage.is_last else decoder

    def forward(given: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(tokens, device=given.device).unsqueeze(0) if shared is None else shared
        out = run(**{"input_ids" if stage.is_first else "inputs_embeds": given, "position_ids": positions})
        tensor: torch.Tensor = out.logits if stage.is_last else out.last_hidden_state  # type: ignore[attr-defined]
        return tensor

    return forward


# --- the schedule --------------------------------------------------------------------------------------------------------


def _schedule(job: JobSpec, mine: tuple[Stage, ...], parts: list[nn.Module], mesh: DeviceMesh) -> Schedule:
    name = job.recipe.pipeline_schedule or "1f1b"
    count = job.mesh.pp * len(mine)
    stages = [
        PipelineStage(
            part, stage.number, count, torch.device(mesh.device_type), group=mesh["pp"].get_group(),
            input_args=_given(job, stage), output_args=_returned(job, stage),
        )
        for stage, part in zip(mine, parts, strict=True)
    ]  # fmt: skip
    last = next((part for stage, part in zip(mine, parts, strict=True) if stage.is_last), None)
    cls: Callable[..., Schedule] = schedules.get_schedule_class(TORCHS_NAMES[name])
    return cls(
        stages if len(mine) > 1 else stages[0], n_microbatches=job.batch.grad_accum_steps, scale_grads=False,
        loss_fn=_loss_of(last, job.model.vocab_size, shifted=job.mesh.cp > 1, chunked=job.recipe.loss == "chunked"),
    )  # fmt: skip


def _loss_of(
    last: nn.Module | None, vocab: int, *, shifted: bool, chunked: bool
) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:  # fmt: skip
    """The schedule's loss, transformers' own or ``chunked``; a rank without the last stage never calls it.

    ``shifted`` labels are each token's successor, which a context-parallel rank cannot derive from its part. A ``chunked`` loss
    reads hidden states, and runs the head's backward at once.
    """
    if chunked and last is not None:
        return loss_of_hidden(last)

    def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        arguments = {"labels": labels, "shift_labels": labels} if shifted else {"labels": labels}
        return cast("torch.Tensor", last.loss_function(logits=logits, **arguments, vocab_size=vocab))  # type: ignore[union-attr, operator]

    return loss


def _given(job: JobSpec, stage: Stage) -> torch.Tensor:
    shape = (job.batch.micro_batch_size, _tokens(job))
    return torch.empty(shape, dtype=torch.int64, device="meta") if stage.is_first else _hidden(job)


def _returned(job: JobSpec, stage: Stage) -> torch.Tensor:
    if job.recipe.loss == "chunked" or not stage.is_last:
        return _hidden(job)
    return _of_each_token(job, job.model.vocab_size, tokens=_tokens(job))


def _tokens(job: JobSpec) -> int:
    """This rank's tokens of every sequence."""
    return job.batch.seq_len // job.mesh.cp


def _hidden(job: JobSpec) -> torch.Tensor:
    """The hidden states that stages exchange: plain tensors, as in torchtitan, under TP split along the sequence unless whole."""
    shares = job.mesh.tp if job.recipe.fsdp2.sequence_parallel else 1
    return _of_each_token(job, job.model.hidden_size, tokens=_tokens(job) // shares)


def _of_each_token(job: JobSpec, width: int, *, tokens: int) -> torch.Tensor:
    shape = (job.batch.micro_batch_size, tokens, width)
    return torch.empty(shape, dtype=COMPUTE[job.recipe.precision], device="meta", requires_grad=True)


@contextmanager
def _phases(schedule: Schedule, enter: Callable[[Phase], None]) -> Iterator[None]:
    """Report when a micro-batch's forward and backward begin; reducing gradients counts as backward.

    The runtime of several stages waits for gathered parameters before it calls the stage, so its actions tell the phase.
    """
    if isinstance(schedule, PipelineScheduleMulti):
        with replaced(schedules, "_get_profiler_function_name", _by_action(schedules._get_profiler_function_name, enter)):
            yield
        return
    with ExitStack() as patches:
        for name, phase in _PHASES:
            patches.enter_context(replaced(schedule._stage, name, _in_phase(getattr(schedule._stage, name), enter, phase)))
        yield


_PHASES = (
    ("forward_one_chunk", Phase.FORWARD),
    ("backward_one_chunk", Phase.BACKWARD),
    ("perform_reduce_grad", Phase.BACKWARD),
)
_BACKWARDS = (schedules.FULL_BACKWARD, schedules.BACKWARD_INPUT, schedules.BACKWARD_WEIGHT, schedules.REDUCE_GRAD)


def _by_action(
    name: Callable[[schedules._Action], str], enter: Callable[[Phase], None]
) -> Callable[[schedules._Action], str]:  # fmt: skip
    def named(action: schedules._Action) -> str:
        if action.computation_type in (schedules.FORWARD, *_BACKWARDS):
            enter(Phase.BACKWARD if action.computation_type in _BACKWARDS else Phase.FORWARD)
        return name(action)

    return named


def _in_phase(run: Callable[..., object], enter: Callable[[Phase], None], phase: Phase) -> Callable[..., object]:
    def entered(*args: object, **options: object) -> object:
        enter(phase)
        return run(*args, **options)

    return entered


# --- replacements where other ranks are missing ---------------------------------------------------------------------------


def _unanswered() -> Iterator[AbstractContextManager[None]]:
    """Replace torch's sends between stages by ones that only hold their tensors, and skip its negotiation of shapes."""
    if not hasattr(schedules._PipelineSchedule, "_warmup_p2p"):
        raise MeasurementError(
            f"pipelines are simulated with the schedules of torch 2.11 to 2.14, and this is {torch.__version__}; install 2.14"
        )
    original: Callable[..., object] = schedules._batch_p2p

    def held(operations: list[dist.P2POp], desc: str | None = None) -> list[Held]:
        original(operations, desc)
        batched = len({one.op for one in operations}) > 1
        return [Held(None, [one.tensor for one in operations], batched=batched)] if operations else []

    def agreed(_schedule: Schedule, stages: list[PipelineStage], *_: object) -> None:
        for stage in stages:
            stage._inference_mode = schedules.InferenceMode.STATIC  # type: ignore[attr-defined]

    yield replaced(schedules, "_batch_p2p", held)
    yield replaced(schedules._PipelineSchedule, "_warmup_p2p", agreed)
