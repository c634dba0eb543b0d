"""Which layers does each pipeline stage have, and which stages does each rank have? Estimates and runs both use this.

Stages are cut like torchtitan's (2026-08, ``distributed/pipeline_parallel.py``, ``_generate_llm_fqn_per_model_part``):
the embedding counts as one layer, the final norm and head as one, and earlier stages get the remaining layers.
"""

from functools import lru_cache
from itertools import accumulate
from typing import Literal, NamedTuple

from zeroplan.errors import SpecError

PipelineSchedule = Literal["gpipe", "1f1b", "interleaved-1f1b", "interleaved-zero-bubble", "zbv"]

#: torch's names of the schedules (torch.distributed.pipelining), which torchtitan's files have too.
TORCHS_NAMES: dict[PipelineSchedule, str] = {
    "gpipe": "GPipe", "1f1b": "1F1B", "interleaved-1f1b": "Interleaved1F1B",
    "interleaved-zero-bubble": "InterleavedZeroBubble", "zbv": "ZBVZeroBubble",
}  # fmt: skip

#: Schedules with one stage per rank; the others have two by default (torchtitan's default).
SINGLE: tuple[PipelineSchedule, ...] = ("gpipe", "1f1b")

#: Schedules that split a backward in two: first the gradients of inputs, later those of weights.
SPLIT: tuple[PipelineSchedule, ...] = ("interleaved-zero-bubble", "zbv")


class Stage(NamedTuple):
    """A stage: its layers, and whether it has the embedding or the final norm and head."""

    number: int
    start: int
    stop: int
    is_first: bool
    is_last: bool

    @property
    def layers(self) -> int:
        """The number of layers."""
        return self.stop - self.start


def stages_per_rank(schedule: PipelineSchedule, wanted: int | None) -> int:
    """Return the number of stages per rank.

    >>> stages_per_rank("1f1b", None), stages_per_rank("interleaved-1f1b", None), stages_per_rank("interleaved-1f1b", 4)
    (1, 2, 4)
    """
    return wanted or (1 if schedule in SINGLE else 2)


@lru_cache(maxsize=1024)
def cut(layers: int, stages: int, by_hand: tuple[int, ...] | None = None, *, fewest: int = 1) -> tuple[Stage, ...]:
    """Return the stages, first to last; ``by_hand`` gives the layers of each.

    Raises SpecError if a stage would have fewer than ``fewest`` layers, or if ``by_hand`` does not add up to ``layers``.

    >>> [stage.layers for stage in cut(32, 4)], [stage.start for stage in cut(32, 4, (6, 9, 9, 8))]
    ([8, 9, 8, 7], [0, 6, 15, 24])
    """
    each = _evenly(layers, stages) if by_hand is None else by_hand
    if len(each) != stages or sum(each) != layers:
        raise SpecError(
            f"pipeline_layers={','.join(map(str, each))} gives {sum(each)} layers to {len(each)} stages, and there are {layers} "
            f"layers and {stages} stages"
        )
    if min(each) < fewest:
        raise SpecError(f"{layers} layers cut into {stages} pipeline stages leave one without a layer; use fewer stages")
    ends = tuple(accumulate(each))
    return tuple(
        Stage(index, stop - count, stop, index == 0, index == stages - 1)
        for index, (count, stop) in enumerate(zip(each, ends, strict=True))
    )


def _evenly(layers: int, stages: int) -> tuple[int, ...]:
    """Return the layers of each stage, as torchtitan cuts them."""
    each, more = divmod(layers + 2, stages)
    return tuple(each + (index < more) - (index == 0) - (index == stages - 1) for index in range(stages))


def indices_of_rank(schedule: PipelineSchedule, *, rank: int, pp: int, stages: int) -> tuple[int, ...]:
    """Return the stages of a rank: every pp-th stage; for ``zbv``, stage ``rank`` and its mirror from the end.

    >>> indices_of_rank("interleaved-1f1b", rank=1, pp=4, stages=8), indices_of_rank("zbv", rank=1, pp=4, stages=8)
    ((1, 5), (1, 6))
    """
    if schedule == "zbv":
        return rank, stages - 1 - rank
    return tuple(range(rank, stages, pp))


def check_schedule(
    schedule: PipelineSchedule, wanted: int | None, *, pp: int, layers: int, micro_batches: int,
    by_hand: tuple[int, ...] | None = None,
) -> None:  # fmt: skip
    """Raise SpecError where torch's schedules raise, and for stages without a layer.

    Source: torch 2.13, torch/distributed/pipelining/schedules.py, ``__init__`` of each schedule.
    """
    each = stages_per_rank(schedule, wanted)
    if schedule in SINGLE and each != 1:
        raise SpecError(f"schedule {schedule!r} has one stage on each rank, not {each}; use interleaved-1f1b, or leave it out")
    if schedule == "zbv" and each != 2:
        raise SpecError(f"schedule 'zbv' has two stages on each rank, not {each}; leave it out")
    if schedule == "1f1b" and micro_batches < pp:
        raise SpecError(f"schedule '1f1b' needs as many micro-batches as ranks, {pp}, not {micro_batches}; accumulate more")
    if schedule.startswith("interleaved"):
        if each == 1:
            raise SpecError(f"schedule {schedule!r} needs several stages on each rank; use 1f1b, or set more")
        rounds = max(1, micro_batches // pp)
        if micro_batches % rounds:
            raise SpecError(
                f"schedule {schedule!r} takes {micro_batches} micro-batches on {pp} ranks in {rounds} rounds, which do not divide "
                "them; use a multiple of the ranks"
            )
    cut(layers, pp * each, by_hand)
