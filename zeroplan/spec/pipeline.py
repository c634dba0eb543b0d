"""How a model is cut into pipeline stages, and which of them a rank has: structure alone, for the estimate and the run alike.

Stages are cut as torchtitan cuts them (2026-08, ``distributed/pipeline_parallel.py``, ``_generate_llm_fqn_per_model_part``):
the embedding counts as one layer, the final norm and head as one, and earlier stages have the layers that do not divide.
"""

from functools import lru_cache
from typing import Literal, NamedTuple

from zeroplan.errors import SpecError

PipelineSchedule = Literal["gpipe", "1f1b", "interleaved-1f1b", "interleaved-zero-bubble", "zbv"]

#: Schedules with one stage on each rank; the others have two, unless more are asked for (torchtitan's default).
SINGLE: tuple[PipelineSchedule, ...] = ("gpipe", "1f1b")

#: Schedules that take a backward in two halves: gradients of inputs first, those of weights later.
SPLIT: tuple[PipelineSchedule, ...] = ("interleaved-zero-bubble", "zbv")

#: Families whose stages are cut without special handling: one kind of attention, no positions added to the embedding.
PIPELINED = ("llama", "mistral", "qwen2", "qwen3", "phi3", "gpt_neox", "mixtral", "qwen3_moe", "deepseek_v3")


class Stage(NamedTuple):
    """A stretch of layers, and whether the embedding stands before it or the final norm and the head after it."""

    number: int
    start: int
    stop: int
    is_first: bool
    is_last: bool

    @property
    def layers(self) -> int:
        """How many there are."""
        return self.stop - self.start


def stages_per_rank(schedule: PipelineSchedule, asked: int | None) -> int:
    """How many stages each rank has.

    >>> stages_per_rank("1f1b", None), stages_per_rank("interleaved-1f1b", None), stages_per_rank("interleaved-1f1b", 4)
    (1, 2, 4)
    """
    return asked or (1 if schedule in SINGLE else 2)


@lru_cache(maxsize=1024)
def cut(layers: int, stages: int) -> tuple[Stage, ...]:
    """Cut so many layers into stages, first to last. Raises SpecError where a stage would have none.

    >>> [stage.layers for stage in cut(32, 4)]
    [8, 9, 8, 7]
    """
    each, more = divmod(layers + 2, stages)
    made: list[Stage] = []
    start = 0
    for index in range(stages):
        is_first, is_last = index == 0, index == stages - 1
        stop = start + each + (index < more) - is_first - is_last
        made.append(Stage(index, start, stop, is_first, is_last))
        start = stop
    if any(stage.layers < 1 for stage in made):
        raise SpecError(f"{layers} layers cut into {stages} pipeline stages leave one without a layer; use fewer stages")
    return tuple(made)


def indices_of_rank(schedule: PipelineSchedule, *, rank: int, pp: int, stages: int) -> tuple[int, ...]:
    """Which stages a rank has: every pp-th, or for the V of ``zbv`` one on the way down and one on the way up.

    >>> indices_of_rank("interleaved-1f1b", rank=1, pp=4, stages=8), indices_of_rank("zbv", rank=1, pp=4, stages=8)
    ((1, 5), (1, 6))
    """
    if schedule == "zbv":
        return rank, stages - 1 - rank
    return tuple(range(rank, stages, pp))


def check_schedule(schedule: PipelineSchedule, asked: int | None, *, pp: int, layers: int, micro_batches: int) -> None:
    """Refuse what torch's schedules refuse, and stages without a layer.

    Source: torch 2.13, torch/distributed/pipelining/schedules.py, ``__init__`` of each schedule.
    """
    each = stages_per_rank(schedule, asked)
    if schedule in SINGLE and each != 1:
        raise SpecError(f"schedule {schedule!r} has one stage on each rank, not {each}; use interleaved-1f1b, or leave it out")
    if schedule == "zbv" and each != 2:
        raise SpecError(f"schedule 'zbv' has two stages on each rank, not {each}; leave it out")
    if schedule == "1f1b" and micro_batches < pp:
        raise SpecError(f"schedule '1f1b' needs as many micro-batches as ranks, {pp}, not {micro_batches}; accumulate more")
    if schedule.startswith("interleaved"):
        if each == 1:
            raise SpecError(f"schedule {schedule!r} needs several stages on each rank; use 1f1b, or ask for more")
        rounds = max(1, micro_batches // pp)
        if micro_batches % rounds:
            raise SpecError(
                f"schedule {schedule!r} takes {micro_batches} micro-batches on {pp} ranks in {rounds} rounds, which do not divide "
                "them; use a multiple of the ranks"
            )
    cut(layers, pp * each)
