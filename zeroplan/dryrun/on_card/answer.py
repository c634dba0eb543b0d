"""Builds the answer of one rank from the phases counted on its GPU."""

import os

import torch
import torch.distributed as dist

from zeroplan.dryrun.loop import Loop
from zeroplan.dryrun.on_card.phases import PhasesOnCard
from zeroplan.dryrun.on_card.task import CardTask
from zeroplan.errors import MeasurementError
from zeroplan.ledger import Phase
from zeroplan.script_card import EndedOnCard, RankOnCard
from zeroplan.verify.backends.gpu import Gpu
from zeroplan.verify.environment import environment


def rank_on_card(task: CardTask, loop: Loop, phases: PhasesOnCard, *, ended: EndedOnCard, said: str) -> RankOnCard:
    """The answer of this rank. Raises MeasurementError without an optimizer step, or if the script never used a GPU."""
    full, gpu = ended == "out of memory", Gpu()
    if full:
        phases.enter(Phase.INIT, loop.completed)
    else:
        _require_steps(loop)
        loop.finish()
        torch.cuda.synchronize()  # another rank may still wait for a message of this one
    return RankOnCard(
        rank=int(os.environ.get("RANK", "0")),
        gpus=dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1")),
        alone=task.alone,
        ended=ended,
        environment=environment(device=gpu.words()),
        settings=gpu.settings(),
        card=gpu.figures(),
        initialisation=phases.initialisation,
        steps=phases.steps,
        said=said,
    )


def _require_steps(loop: Loop) -> None:
    if not loop.completed:
        raise MeasurementError(
            "the script ended without an optimizer step; let it take at least one (more data, fewer accumulation steps)"
        )
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise MeasurementError("the script ran its steps without a GPU: torch never used CUDA; set its device to 'cuda'")
