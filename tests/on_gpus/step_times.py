"""The kept records' step times beside the clock's: ``python -m tests.on_gpus.step_times``.

Steps after the first are compared, without the time of collectives, since one GPU played one rank of many. The GPU's times repeat
to a hundredth; those of the CPU, which shared its cores, vary by half, so that the quickest step is shown beside the median.
"""

from __future__ import annotations

from functools import cache
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from tests.on_gpus.gpu_records import files, results
from zeroplan.estimator import account_of
from zeroplan.steptime import step_time
from zeroplan.steptime.parts import Does

if TYPE_CHECKING:
    from zeroplan.measurement import Measurement

#: Cases whose quickest steps gave the constants of :mod:`zeroplan.steptime.launches`, ``stepping`` and ``pointwise``, by how their
#: names begin.
GAVE = (
    "llama-3.2-1b deepspeed-0", "llama-3.2-1b deepspeed-1", "llama-3.2-1b deepspeed-3", "llama-3.2-1b/2 deepspeed-",
    "llama-3.2-1b fsdp1-3 r0/8 bf16-mixed 1x", "llama-3.2-1b fsdp2-3 r0/8 bf16-mixed 1x",
    "llama-3.2-1b fsdp2-3 r0/8 bf16-mixed selective", "llama-3.1-8b ddp-0 r0/1", "llama-3.1-8b fsdp2-3 r0/2",
    "qwen3-0.6b fsdp2-3 r0/8 bf16-mixed full 1x512",
)  # fmt: skip


class Timed(NamedTuple):
    """A case, its quickest and its median step, and what the clock says. [s]"""

    name: str
    quickest: float
    middle: float
    predicted: float

    @property
    def error(self) -> float:
        """Predicted over the quickest step, less one."""
        return self.predicted / self.quickest - 1

    @property
    def gave(self) -> bool:
        """Whether a constant was taken from it."""
        return self.name.startswith(GAVE)


@cache
def timed() -> tuple[Timed, ...]:
    """Every record of a named GPU that has step times, in the order of the files; others are of toys."""
    return tuple(
        Timed(one.name, min(steps), median(steps), _predicted(one.record))
        for path in files()
        for one in results(path)
        if one.record is not None and one.record.job.cluster.gpu is not None and (steps := _steps(one.record))
    )


def _steps(record: Measurement) -> list[float]:
    return [found for step in record.steps[1:] if (found := step.seconds) is not None]


def _predicted(record: Measurement) -> float:
    job = record.job
    found = step_time(account_of(job, job.batch), job.model, job.recipe, job.mesh, job.batch, job.cluster)
    moved = record.process_group not in ("fake", "none")
    return sum(float(part.seconds) for part in found.parts if moved or part.does not in (Does.SENDING, Does.SENDING_AT_STEP))


if __name__ == "__main__":
    for row in timed():
        print(f"{row.name:70} {row.quickest:.3f} {row.middle:.3f} {row.predicted:.3f} {row.error:+.0%} {'gave' * row.gave}")  # noqa: T201
