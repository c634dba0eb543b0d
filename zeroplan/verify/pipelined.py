"""One rank of a pipeline: its stages of transformers' module under FSDP2, driven by the schedules of torch's own pipelining.

Stages are cut as torchtitan cuts transformers' models: what a stage does not have is an identity, and every stage makes its own
rotary tables. Token ids are on the ranks with the first stage, labels on those with the last. Shapes of what is sent are given
to the stages, so that no pass is run to learn them.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.pipelining import stage as stages
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

from zeroplan.errors import MeasurementError
from zeroplan.ledger import Kind, Phase
from zeroplan.spec.job import JobSpec
from zeroplan.spec.pipeline import Stage, cut, indices_of_rank, stages_per_rank
from zeroplan.verify.engines import (
    COMPUTE,
    Watcher,
    fsdp2_labels,
    give_memory,
    labelled,
    make_optimizer,
    mixed_precision,
    resharding,
    stored_dtype,
)
from zeroplan.verify.replaced import replaced
from zeroplan.verify.workload import causal_module, find_blocks

Schedule = PipelineScheduleSingle | PipelineScheduleMulti
_SCHEDULES = {
    "gpipe": schedules.ScheduleGPipe,
    "1f1b": schedules.Schedule1F1B,
    "interleaved-1f1b": schedules.ScheduleInterleaved1F1B,
    "interleaved-zero-bubble": schedules.ScheduleInterleavedZeroBubble,
    "zbv": schedules.ScheduleZBVZeroBubble,
}


def pipeline_mesh(job: JobSpec, device: str) -> DeviceMesh:
    """All ranks, pipeline stages outermost, as torchtitan arranges them."""
    mesh = job.mesh
    replicas = {"replicate": mesh.dp_replicate} if mesh.dp_replicate > 1 else {}
    ways = {"pp": mesh.pp, **replicas, "shard": mesh.dp_shard}
    return init_device_mesh(device, tuple(ways.values()), mesh_dim_names=tuple(ways))


class Pipelined:
    """FSDP2 around every block of this rank's stages and around each stage, under a schedule of torch's pipelining."""

    handed_on = Kind.UNSHARDED_GRADIENTS
    kept: Kind | None = Kind.GRADIENTS

    def __init__(self, job: JobSpec, mesh: DeviceMesh, watcher: Watcher) -> None:
        self._job, self._watcher = job, watcher
        rank = mesh["pp"].get_local_rank()
        self._stages = _stages_of(job, rank)
        parts = [_part(job, stage) for stage in self._stages]
        self.module = nn.ModuleList(parts)
        watcher.name_modules(parts[0] if len(parts) == 1 else self.module)
        within = mesh["replicate", "shard"] if job.mesh.dp_replicate > 1 else mesh["shard"]
        for part in parts:
            _shard(part, job, within)
        give_memory(self.module, mesh.device_type)
        watcher.claim(Kind.PARAMETERS, (*self.module.parameters(), *self.module.buffers()))
        self._schedule = _schedule(job, self._stages, parts, mesh)
        self._ids, self._labels = (self._tokens(mesh.device_type, which) for which in ("is_first", "is_last"))
        self.optimizer = make_optimizer(self.module.parameters(), job.recipe)

    def _tokens(self, device: str, which: str) -> torch.Tensor | None:
        """Ids of all micro-batches of a step, where this rank has the stage that reads them."""
        if not any(getattr(stage, which) for stage in self._stages):
            return None
        batch = self._job.batch
        ids = torch.randint(
            0, self._job.model.vocab_size, (batch.grad_accum_steps * batch.micro_batch_size, batch.seq_len), device=device
        )
        self._watcher.claim(Kind.ACTIVATIONS, (ids,))
        return ids

    def micro_step(self, enter: Callable[[Phase], None], *, last: bool) -> None:
        """Take all micro-batches of a step."""
        assert last  # noqa: S101  the schedule takes all of them in one call
        inputs = () if self._ids is None else (self._ids,)
        losses: list[torch.Tensor] | None = None if self._labels is None else []
        with _phases(self._schedule_stages(), enter):
            enter(Phase.FORWARD)
            self._schedule.step(*inputs, target=self._labels, losses=losses, return_outputs=False)

    def _schedule_stages(self) -> list[PipelineStage]:
        schedule = self._schedule
        stages = [schedule._stage] if isinstance(schedule, PipelineScheduleSingle) else schedule._stages
        return cast("list[PipelineStage]", stages)

    def optimizer_step(self) -> None:
        """Update this rank's chunks of its stages."""
        self.optimizer.step()

    def zero_grad(self) -> None:
        """Drop the gradients."""
        self.optimizer.zero_grad()

    @contextmanager
    def labels(self, watcher: Watcher) -> Iterator[None]:
        """Tell buffers apart by the function that asks for them; what is received counts among activations."""
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
    stages = cut(job.model.num_hidden_layers, job.mesh.pp * each)
    return tuple(stages[at] for at in indices_of_rank(schedule, rank=rank, pp=job.mesh.pp, stages=len(stages)))


# --- a stage's part of the module ----------------------------------------------------------------------------------------


def _part(job: JobSpec, stage: Stage) -> nn.Module:
    """Build the stage's part of the model without memory, and let it take and return plain tensors."""
    whole = causal_module(job.model, job.recipe, stored_dtype(job.recipe), "meta")
    decoder: nn.Module = whole.get_decoder()  # type: ignore[operator]  # a transformers model
    stack = next(name for name, part in decoder.named_children() if isinstance(part, nn.ModuleList))
    setattr(decoder, stack, nn.ModuleList(list(getattr(decoder, stack))[stage.start : stage.stop]))
    if not stage.is_first:
        decoder.set_input_embeddings(nn.Identity())  # type: ignore[operator]
    if not stage.is_last:
        whole.set_output_embeddings(nn.Identity())  # type: ignore[operator]
        setattr(decoder, next(name for name in ("norm", "final_layer_norm") if hasattr(decoder, name)), nn.Identity())
    whole.forward = _tensor_to_tensor(whole, decoder, stage)
    return whole


def _tensor_to_tensor(whole: nn.Module, decoder: nn.Module, stage: Stage) -> Callable[[torch.Tensor], torch.Tensor]:
    run: Callable[..., object] = whole.forward if stage.is_last else decoder

    def forward(given: torch.Tensor) -> torch.Tensor:
        out = run(**{"input_ids" if stage.is_first else "inputs_embeds": given})
        tensor: torch.Tensor = out.logits if stage.is_last else out.last_hidden_state  # type: ignore[attr-defined]
        return tensor

    return forward


def _shard(part: nn.Module, job: JobSpec, mesh: DeviceMesh) -> None:
    policy, reshard = mixed_precision(job.recipe), resharding(job.recipe)
    for block in find_blocks(part):
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(part, mesh=mesh, mp_policy=policy, reshard_after_forward=False)


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
    cls: Callable[..., Schedule] = _SCHEDULES[name]
    return cls(
        stages if len(mine) > 1 else stages[0], n_microbatches=job.batch.grad_accum_steps, scale_grads=False,
        loss_fn=_loss_of(last, job.model.vocab_size),
    )  # fmt: skip


def _loss_of(last: nn.Module | None, vocab: int) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Transformers' own loss; where it is on another rank, the schedule only asks whether there is one."""

    def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return cast("torch.Tensor", last.loss_function(logits=logits, labels=labels, vocab_size=vocab))  # type: ignore[union-attr, operator]

    return loss


def _given(job: JobSpec, stage: Stage) -> torch.Tensor:
    shape = (job.batch.micro_batch_size, job.batch.seq_len)
    return torch.empty(shape, dtype=torch.int64, device="meta") if stage.is_first else _hidden(job)


def _returned(job: JobSpec, stage: Stage) -> torch.Tensor:
    return _of_each_token(job, job.model.vocab_size) if stage.is_last else _hidden(job)


def _hidden(job: JobSpec) -> torch.Tensor:
    return _of_each_token(job, job.model.hidden_size)


def _of_each_token(job: JobSpec, width: int) -> torch.Tensor:
    shape = (job.batch.micro_batch_size, job.batch.seq_len, width)
    return torch.empty(shape, dtype=COMPUTE[job.recipe.precision], device="meta", requires_grad=True)


@contextmanager
def _phases(stages: list[PipelineStage], enter: Callable[[Phase], None]) -> Iterator[None]:
    """Tell when a micro-batch goes forward and when backward; gradients are reduced as part of the backward."""
    with ExitStack() as patches:
        for stage in stages:
            for name, phase in _PHASES:
                patches.enter_context(replaced(stage, name, _in_phase(getattr(stage, name), enter, phase)))
        yield


_PHASES = (
    ("forward_one_chunk", Phase.FORWARD), ("backward_one_chunk", Phase.BACKWARD), ("backward_weight_one_chunk", Phase.BACKWARD),
    ("perform_reduce_grad", Phase.BACKWARD),
)  # fmt: skip


def _in_phase(run: Callable[..., object], enter: Callable[[Phase], None], phase: Phase) -> Callable[..., object]:
    def entered(*args: object, **options: object) -> object:
        enter(phase)
        return run(*args, **options)

    return entered


# --- where there is no other rank ------------------------------------------------------------------------------------------


class _Held:
    """A send or receive that is over at once, and holds its tensor as NCCL's does.

    In a batch until it is waited for, else as long as it is referred to. Source: torch 2.13, ``pointToPoint`` in
    torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp (``work->outputs_``).
    """

    def __init__(self, tensors: list[torch.Tensor], *, batched: bool) -> None:
        self._tensors, self._batched = tensors, batched

    def wait(self) -> bool:
        """End a batch; it lets go of its tensors."""
        if self._batched:
            self._tensors = []
        return True


def _unanswered() -> Iterator[AbstractContextManager[None]]:
    """Let stages agree that shapes are given, and let sends hold what they send, where no other rank answers."""
    if not hasattr(schedules._PipelineSchedule, "_warmup_p2p"):
        raise MeasurementError(f"pipelines are simulated with the schedules of torch 2.13, and this is {torch.__version__}")
    original: Callable[..., object] = schedules._batch_p2p

    def held(operations: list[dist.P2POp], desc: str | None = None) -> list[_Held]:
        original(operations, desc)
        batched = len({one.op for one in operations}) > 1
        return [_Held([one.tensor for one in operations], batched=batched)] if operations else []

    def agreed(_schedule: Schedule, stages: list[PipelineStage], *_: object) -> None:
        for stage in stages:
            stage._inference_mode = schedules.InferenceMode.STATIC  # type: ignore[attr-defined]

    yield replaced(schedules, "_batch_p2p", held)
    yield replaced(schedules._PipelineSchedule, "_warmup_p2p", agreed)
