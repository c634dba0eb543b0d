"""The engines that ``verify`` can run, with their stages, in the order of the documentation."""

from zeroplan.spec.job import ENGINE_STAGES

STAGES = tuple((engine, stage) for engine in ("ddp", "fsdp2", "deepspeed") for stage in ENGINE_STAGES[engine])
