"""Compares the step times of kept records with the predicted ones: ``python -m tests.on_gpus.step_times``.

The first step is left out, and the time of collectives too, since one GPU stood for one rank of many. Steps bound by the GPU
repeat within 1 %. Steps bound by the CPU, which shared its cores, vary by half. So the quickest step is shown beside the median.
"""

from __future__ import annotations

from functools import cache
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from tests.on_gpus.gpu_records import files, results
from zeroplan.estimator import account_of
from zeroplan.steptime import shares_of, step_time
from zeroplan.steptime.launches import OUR_HOST
from zeroplan.steptime.parts import Does

if TYPE_CHECKING:
    from zeroplan.measurement import Measurement

#: Beginnings of the names of cases whose quickest steps gave the constants of :mod:`zeroplan.steptime.launches`, ``stepping``
#: and ``pointwise``.
GAVE = (
    "llama-3.2-1b deepspeed-0", "llama-3.2-1b deepspeed-1", "llama-3.2-1b deepspeed-3", "llama-3.2-1b/2 deepspeed-",
    "llama-3.2-1b fsdp1-3 r0/8 bf16-mixed 1x", "llama-3.2-1b fsdp2-3 r0/8 bf16-mixed 1x",
    "llama-3.2-1b fsdp2-3 r0/8 bf16-mixed selective", "llama-3.1-8b ddp-0 r0/1", "llama-3.1-8b fsdp2-3 r0/2",
    "qwen3-0.6b fsdp2-3 r0/8 bf16-mixed full 1x512",
)  # fmt: skip


class Timed(NamedTuple):
    """A case with its quickest, its median and its predicted step. [s]"""

    name: str
    quickest: float
    middle: float
    predicted: float

    @property
    def error(self) -> float:
        """Return the predicted over the quickest step, less one."""
        return self.predicted / self.quickest - 1

    @property
    def gave(self) -> bool:
        """Whether a constant was derived from the case."""
        return self.name.startswith(GAVE)


@cache
def timed() -> tuple[Timed, ...]:
    """Return every record that has step times and names its GPU, in the order of the files. Others are of toy models."""
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
    share = shares_of(job.cluster)._replace(launching=OUR_HOST)
    found = step_time(account_of(job, job.batch), job.model, job.recipe, job.mesh, job.batch, job.cluster, share=share)
    moved = record.process_group not in ("fake", "none")
    return sum(float(part.seconds) for part in found.parts if moved or part.does not in (Does.SENDING, Does.SENDING_AT_STEP))


if __name__ == "__main__":
    for row in timed():
        print(f"{row.name:70} {row.quickest:.3f} {row.middle:.3f} {row.predicted:.3f} {row.error:+.0%} {'gave' * row.gave}")  # noqa: T201
