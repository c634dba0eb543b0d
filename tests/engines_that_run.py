"""The engines that can be run, each with its stages, in the order of the pages."""

from zeroplan.spec.job import ENGINE_STAGES

STAGES = tuple((engine, stage) for engine in ("ddp", "fsdp2", "deepspeed") for stage in ENGINE_STAGES[engine])
