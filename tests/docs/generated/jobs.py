"""The example job of the tables, and its variants."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zeroplan import estimate, job
from zeroplan.spec.job import ENGINE_STAGES

if TYPE_CHECKING:
    from zeroplan import Estimate

SAID = {"model": "llama-3.1-8b", "gpus": 8, "seq_len": 4096, "gpu": "h100-sxm-80gb"}


def example(**said: object) -> Estimate:
    """Return the estimate of the example job, with these settings changed."""
    return estimate(job(**{**SAID, **said}))  # type: ignore[arg-type]  # job checks every field


def of(engine: str, stage: str | int, **said: object) -> Estimate:
    """Return the estimate of the example job under an engine and a stage."""
    return example(engine=engine, stage=int(stage), **said)


def title(engine: str, stage: str | int) -> str:
    """Return the usual name of an engine and stage."""
    name = ENGINE_STAGES[engine][int(stage)]  # type: ignore[index]  # the keys are literals
    return name if str(stage) in name or engine == "ddp" else f"{name}, stage {stage}"
