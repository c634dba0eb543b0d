"""The files that run a job, as ``zeroplan plan --emit`` writes them, for download from the page."""

from zeroplan.errors import SpecError
from zeroplan.export.files import TARGETS, Target, export
from zeroplan.spec.job import JobSpec

_HELD = (
    "accelerate returns logits in fp32, and a loop may keep them in the backward. The memory above does not count them; "
    "--keep-logits fp32 does"
)
_NO_PROGRAM = "engine paper is a formula without a program; choose ddp, fsdp2 or deepspeed"


def configurations(job: JobSpec) -> list[dict[str, object]]:
    """Return for each target its files, launch command and notes, or the reason why it cannot express the job."""
    return [_configuration(job, target) for target in TARGETS]


def _configuration(job: JobSpec, target: Target) -> dict[str, object]:
    payload: dict[str, object] = {"target": target, "files": [], "launch": "", "notes": [], "refusal": ""}
    if job.recipe.engine == "paper":
        return {**payload, "refusal": _NO_PROGRAM}
    try:
        made = export(job, target)
    except SpecError as refusal:
        return {**payload, "refusal": str(refusal).removeprefix(f"--emit {target} cannot express this layout: ")}
    held = target == "accelerate" and not job.recipe.keep_logits and job.recipe.precision != "fp32"
    notes = [*made.notes, *((_HELD,) if held else ())]
    return {**payload, "files": [file._asdict() for file in made.files], "launch": made.launch, "notes": notes}
