"""Does attention get a mask for padding?

Trainers put the sequences of a micro-batch in rows of one length. In its longest micro-batch one sequence has the full length, and
another is shorter, so that its row ends in padding. Attention then gets a mask, which costs memory (:mod:`zeroplan.spec.padding`).
"""

from dataclasses import replace
from typing import TYPE_CHECKING

from zeroplan.spec.job import JobSpec
from zeroplan.spec.padding import is_modelled_padded, not_padded

if TYPE_CHECKING:
    from zeroplan.resolve.batching import Varying

COUNTED = (
    "the trainer pads the sequences of a micro-batch to one length, and the mask that attention then needs is counted; add "
    "--no-padded if they are all equally long"
)
"""Shown if a trainer's file has several sequences in a micro-batch and does not join them."""


def with_padding(job: JobSpec, *, padded: bool | None, varying: "Varying | None", trainer_pads: bool) -> tuple[JobSpec, str]:
    """Return the job with padding if a micro-batch may have sequences of different lengths, and a note.

    The user's own flag (``padded``) decides if there is one. Lengths of ``--lengths`` come second, the trainer's habit third. On
    Megatron-Core trainers join sequences (ms-swift 3602360a, megatron/arguments/megatron_args.py, padding_free).
    """
    pads = trainer_pads and job.recipe.engine != "megatron"
    if padded is not None or job.batch.micro_batch_size == 1 or not _may_differ(varying, trainer_pads=pads):
        return job, ""
    counted = is_modelled_padded(job.model, job.recipe, job.mesh)
    note = padding_note(job, is_counted=counted) if varying is None or not counted else ""
    return replace(job, recipe=replace(job.recipe, padded=counted)), note


def padding_note(job: JobSpec, *, is_counted: bool) -> str:
    """Return a note on a job whose trainer pads.

    It is empty if the micro-batch is one sequence, if the engine's trainers join sequences, or if attention always has a mask.
    """
    if job.batch.micro_batch_size == 1 or job.recipe.engine == "megatron" or job.recipe.attention == "eager":
        return ""
    if is_counted:
        return COUNTED
    beside = next((one for one, _ in not_padded(job.model, job.recipe, job.mesh) if one), "")
    return f"what attention needs for padding is not counted with {beside}, so that the answer is too low with padding"


def _may_differ(varying: "Varying | None", *, trainer_pads: bool) -> bool:
    if varying is None:
        return trainer_pads
    return varying.batching.way == "padded" and len(set(varying.tokens)) > 1
