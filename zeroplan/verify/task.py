"""The message that tells a measuring process which rank of which job to run."""

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Literal

from zeroplan.errors import SpecError
from zeroplan.measurement import Tensors
from zeroplan.spec.base import Count, CountOrZero, Range, Spec
from zeroplan.spec.job import JobSpec
from zeroplan.spec.recipe import OF_LIGER, ON_PAPER
from zeroplan.spec.releases import release_of

Transport = Literal["gloo", "nccl", "fake"]
"""The process group: gloo, NCCL, or torch's fake one, in which a single process plays one rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Card(Spec):
    """The GPU that a rank found. [bytes]"""

    name: str
    total_bytes: CountOrZero


@dataclass(frozen=True, slots=True, kw_only=True)
class Task(Spec):
    """One run in processes of its own: one process per rank with gloo or nccl, a single one (``rank``) with fake.

    ``tensors`` are on the CPU, on GPUs, or fake; ``all_layers=False`` runs a few layers and extends the result.
    """

    job: JobSpec
    transport: Transport
    tensors: Tensors = "cpu"
    all_layers: bool = True
    rank: CountOrZero | None = None
    steps: Count = 3
    workload: str = ""
    timeout_s: Annotated[float, Range(0.1, 1e6)] = 300.0
    store: str = ""
    """File through which the ranks find each other, so that no port is needed."""
    folder: str = ""
    """Folder in which the ranks write their records."""
    snapshots: str = ""
    """Folder in which ranks on GPUs write snapshots of the allocator; empty for none."""


def refuse_unrunnable(job: JobSpec) -> None:
    """Raise SpecError for an engine that is only a formula, and for another release of transformers than the installed one."""
    if job.recipe.engine in ON_PAPER:
        raise SpecError(
            f"engine {job.recipe.engine!r} is a formula and cannot be run; use engine ddp, fsdp1, fsdp2 or deepspeed"
        )
    for what, name in _not_run(job):
        if what:
            raise SpecError(f"{name} is estimated from its source and cannot be run here; leave it out")
    asked, here = job.recipe.transformers, _installed_transformers()
    if asked is not None and here is not None and release_of(asked) != release_of(here):
        raise SpecError(f"transformers={asked!r} cannot run here: {here} is installed; install that release, or leave it out")


def _not_run(job: JobSpec) -> tuple[tuple[object, str], ...]:
    """Fine-tuning settings that no installed code runs: whether the job has each, and its name."""
    adapter = job.model.adapter
    return (
        (set(job.recipe.fused_parts) - OF_LIGER - {"loss-in-pieces"}, "fused_kernels"),
        (job.recipe.reentrant, "reentrant=True"),
        (adapter is not None and adapter.quantize == "gptq", "quantize='gptq'"),
        (adapter is not None and adapter.compute == "fp32", "lora_compute='fp32'"),
        (adapter is not None and adapter.bitsandbytes, "bitsandbytes"),
    )


def _installed_transformers() -> str | None:
    try:
        return ".".join(version("transformers").split(".")[:2])
    except PackageNotFoundError:
        return None
