"""torch's pipelining: answers the messages in which stages exchange the shapes that they will send.

The gradients that a stage receives have the shapes of its outputs, so the first stage runs alone. A later stage receives its input
shapes from the stage before it (torch 2.13, ``torch/distributed/pipelining/stage.py``, ``_recv_meta``), so both run.
"""

from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import Any, NoReturn

import torch

from zeroplan.dryrun.loop import Loop
from zeroplan.dryrun.patches import Patch
from zeroplan.dryrun.rank_messages import RankMessages
from zeroplan.dryrun.sent_objects import pass_over
from zeroplan.errors import SpecError
from zeroplan.verify.replaced import put

Answer = Callable[[Any, int], object]


def patches(messages: RankMessages, loop: Loop) -> dict[str, Patch]:
    """The patches for torch's pipelining; other stages may run in other processes."""

    def patch(module: ModuleType) -> None:
        _tell_backward(loop, module._PipelineStageBase)
        stage_class: Any = module.PipelineStage
        if hasattr(stage_class, "_recv_meta"):
            put(stage_class, _recv_meta=_received(messages, module))
        if hasattr(stage_class, "_warmup_backward_result"):
            put(stage_class, **_agreed(messages, stage_class))

    return {
        "torch.distributed.pipelining.stage": patch,
        "torch.distributed.pipelining.schedules": lambda module: _tell_steps(loop, module),
    }


def _received(messages: RankMessages, module: Any) -> Answer:  # noqa: ANN401
    """Replace the next stage's report of gradient shapes by this stage's output shapes, if it runs alone."""
    ask: Answer = module.PipelineStage._recv_meta

    def received(stage: Any, source: int) -> object:  # noqa: ANN401  torch's own, without types
        if source < stage.stage_index or messages.companions:
            return ask(stage, source)
        pass_over(messages, stage._resolve_peer_global_rank(source), stage.group)
        return _own_shapes(module, stage)

    return received


def _tell_steps(loop: Loop, module: Any) -> None:  # noqa: ANN401
    """Report the begin of a schedule's step: with several stages it gathers parameters before the first forward."""

    def reporting(step: Callable[..., object]) -> Callable[..., object]:
        @wraps(step)
        def stepped(schedule: Any, *args: object, **kwargs: object) -> object:  # noqa: ANN401
            if schedule._has_backward:
                loop.begin_passes()
            return step(schedule, *args, **kwargs)

        return stepped

    for schedule in (module.PipelineScheduleSingle, module.PipelineScheduleMulti):
        put(schedule, step=reporting(schedule.step))


def _tell_backward(loop: Loop, stage_class: Any) -> None:  # noqa: ANN401
    """Report backwards that a schedule splits into input and weight gradients by ``torch.autograd.grad``."""
    names = ("backward_one_chunk", "backward_weight_one_chunk")
    put(stage_class, **{name: loop.in_backward(getattr(stage_class, name)) for name in names})


def _agreed(messages: RankMessages, stage_class: Any) -> dict[str, object]:  # noqa: ANN401
    """Return this stage's own vote as the result if it runs alone (``_warmup_forward_vote``)."""
    vote, ask = stage_class._warmup_forward_vote, stage_class._warmup_backward_result

    def voted(stage: Any, *args: object, **given: object) -> object:  # noqa: ANN401
        found = vote(stage, *args, **given)
        if not messages.companions:
            stage.voted = int(found.item())
        return found

    def result(stage: Any, *args: object, **given: object) -> object:  # noqa: ANN401
        found = ask(stage, *args, **given)
        is_here = stage.is_last or stage._is_same_rank(stage.stage_index + 1)
        return found if is_here or messages.companions else torch.tensor([stage.voted], dtype=torch.int32, device=stage.device)

    return {"_warmup_forward_vote": voted, "_warmup_backward_result": result}


def _alone(module: ModuleType) -> None:
    def received(stage: Any, source: int) -> object:  # noqa: ANN401
        return _refused(stage, source) if source < stage.stage_index else _own_shapes(module, stage)

    put(module.PipelineStage, _recv_meta=received)
    put(module.PipelineStage, **_of_one_mind(module))


ON_A_CARD: dict[str, Patch] = {"torch.distributed.pipelining.stage": _alone}
"""The patch for one stage on a real GPU without the others."""


def _own_shapes(module: Any, stage: Any) -> object:  # noqa: ANN401
    metas = (one if one is None or one.requires_grad else None for one in stage._stage_meta.outputs)
    return module._StageBackwardMeta(backward_metas=tuple(metas))


def _refused(stage: Any, source: int) -> NoReturn:  # noqa: ANN401
    raise SpecError(
        f"stage {stage.stage_index} of a pipeline receives its inputs' shapes from stage {source}, which does not run here; choose "
        f"a rank of the first stage (--as-rank 0)"
    )


def _of_one_mind(module: Any) -> dict[str, object]:  # noqa: ANN401
    """Return this stage's vote on dynamic shapes as the result of all (``_warmup_forward_vote``, ``_warmup_backward_result``)."""
    vote: Any = getattr(module.PipelineStage, "_warmup_forward_vote", None)

    def voted(stage: Any, has_backward: bool, **given: object) -> object:  # noqa: ANN401, FBT001  torch's signature
        sent = vote(stage, has_backward, **given)
        stage.voted = torch.full_like(sent, int(not module.InferenceMode.needs_dynamic(stage._user_meta, has_backward)))
        return stage.voted

    return {"_warmup_forward_vote": voted, "_warmup_backward_result": lambda stage, *_, **__: stage.voted}
