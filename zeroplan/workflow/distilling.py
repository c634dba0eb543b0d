"""The phases of distillation: in every step a teacher model runs a forward, and the loss reads its hidden states.

Source: trl 1.16, trainer/distillation_trainer.py, DistillationTrainer. DeepSpeed's stage 3 shards the teacher. With other engines
accelerate prepares it for evaluation, which does not shard it, so every rank holds the whole teacher.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from zeroplan.catalog.model import model as find_model
from zeroplan.catalog.model import tower_beside
from zeroplan.engines.precisions import widths
from zeroplan.errors import SpecError
from zeroplan.estimator import Estimate
from zeroplan.ledger import Kind, Line
from zeroplan.spec.job import JobSpec
from zeroplan.spec.mesh import MeshSpec
from zeroplan.spec.recipe import WITH_TEACHERS_LOGITS, DeepSpeedOptions
from zeroplan.transformer.params import parameter_count
from zeroplan.transformer.vision import weights_alone
from zeroplan.workflow.forward import held_after_forward
from zeroplan.workflow.options import WorkflowOptions
from zeroplan.workflow.phases import DRY_RUN, LoopPhase
from zeroplan.workflow.preference import training
from zeroplan.workflow.reference import Reference, bytes_of_a_logit, reference_of

READ = "trl 1.16, trainer/distillation_trainer.py, _compute_loss"
OF_SWIFT = ("jsd", "jsd and sft")
"""How ms-swift compares all logits with the teacher's."""


class Teacher(NamedTuple):
    """The teacher model of a distillation."""

    model: Reference
    read: tuple[Line, ...]
    """The teacher's tensors that the loss reads."""
    parameters: int


def teacher_of(job: JobSpec, name: str | None) -> Teacher:
    """Return the teacher for a student's job, in the student's dtype; raises SpecError for a different vocabulary. [bytes]

    ms-swift has no copy of a teacher that is the model without its adapters (arguments/rlhf_args.py, _check_teacher).
    """
    if name is None:
        raise SpecError("distill needs a teacher; add --teacher-model NAME (`zeroplan models` lists them)")
    teacher = find_model(name)
    if teacher.vocab_size != job.model.vocab_size:
        raise SpecError(
            f"--teacher-model {name} has a vocabulary of {teacher.vocab_size:,}, the student one of {job.model.vocab_size:,}; "
            "TRL compares whole distributions, so choose two with the same"
        )
    recipe, mesh = job.recipe, job.mesh
    if recipe.log_probs in OF_SWIFT and job.model.adapter is not None and teacher.name == job.model.name:
        itself = replace(job, recipe=replace(recipe, log_probs="tiles"))
        return Teacher(reference_of(itself, "teacher", made=(_logits(itself, "its"),)), (), 0)
    if recipe.engine != "deepspeed":
        recipe, mesh = replace(recipe, engine="ddp", zero_stage=0), MeshSpec()
    theirs = replace(job, model=teacher, recipe=recipe, mesh=mesh)
    if job.recipe.log_probs in WITH_TEACHERS_LOGITS:  # which the loss counts, too
        theirs = replace(theirs, recipe=replace(recipe, log_probs="tiles"))
        return Teacher(reference_of(theirs, "teacher", made=(_logits(theirs, "its"),)), (), parameter_count(teacher))
    return Teacher(reference_of(theirs, "teacher", head=False), tuple(_read(theirs, job)), parameter_count(teacher))


def scorer_of(job: JobSpec, options: WorkflowOptions) -> Teacher | None:
    """Return the teacher that scores the rollouts of ms-swift's GRPO with the logits of all tokens; None without one. [bytes]

    Source: ms-swift 3602360a, rlhf_trainers/grpo_trainer.py, _compute_teacher_logps, and rollout_mixin.py, _setup_teacher. With
    adapters and the same model it is the trained model without them. DeepSpeed's stage 3 shards it; with other engines every
    rank holds it whole. Of its vision tower the weights count.
    """
    if options.scored_by is None:
        return None
    teacher, recipe, mesh, each = find_model(options.scored_by), job.recipe, job.mesh, bytes_of_a_logit(options.workflow)
    if job.model.adapter is not None and teacher.name == job.model.name:
        return Teacher(reference_of(job, "teacher", all_logits=each), (), 0)
    if (tower := tower_beside(options.scored_by)) is not None:
        teacher = replace(teacher, vision=replace(weights_alone(tower), freeze_tower=True))
    if recipe.engine != "deepspeed":
        recipe, mesh = replace(recipe, engine="ddp", zero_stage=0), MeshSpec()
    elif options.stage_of_teacher is not None:
        recipe = replace(recipe, zero_stage=options.stage_of_teacher, deepspeed=DeepSpeedOptions())
    theirs = replace(job, model=teacher, recipe=recipe, mesh=mesh)
    return Teacher(reference_of(theirs, "teacher", all_logits=each), (), parameter_count(teacher))


def _read(job: JobSpec, student: JobSpec) -> Iterator[Line]:
    """Yield the teacher's tensors that the loss reads, in its forward and backward."""
    width, batch, hidden = widths(job.recipe.precision).compute, job.batch, job.model.hidden_size
    scored = batch.micro_batch_size * (batch.seq_len - job.recipe.prompt_len)
    yield Line(Kind.TEMPORARY, width * scored * hidden, "teacher: hidden states of the tokens that count", "", READ)
    if job.recipe.zero_stage == 3:  # gathered for the tiles; later the gradient of the student's head uses this memory
        beyond = width * job.model.vocab_size * max(0, hidden - student.model.hidden_size)
        yield Line(Kind.GATHER, beyond, "teacher: head, gathered, beyond the gradient of the student's", "", READ)


def _logits(job: JobSpec, whose: str) -> Line:
    width, batch = widths(job.recipe.precision).compute, job.batch
    n_bytes = width * batch.micro_batch_size * batch.seq_len * job.model.vocab_size
    return Line(Kind.LOGITS, n_bytes, f"{whose} logits of all tokens, until the loss", "", READ)


def phases(answer: Estimate, teacher: Teacher, beside: tuple[Line, ...]) -> Iterator[LoopPhase]:
    """Yield the teacher's forward and the training step; the lines ``beside`` are alive in both. [bytes]"""
    width, batch, hidden = widths(answer.job.recipe.precision).compute, answer.job.batch, answer.job.model.hidden_size
    states = width * batch.micro_batch_size * batch.seq_len * hidden
    student, kept = Line(Kind.TEMPORARY, states, "student: hidden states, until the loss", "", READ), held_after_forward(answer)
    if answer.job.recipe.log_probs in WITH_TEACHERS_LOGITS:  # the loss has not begun
        student, kept = _logits(answer.job, "the student's"), tuple(line for line in kept if line.kind is not Kind.LOGITS)
    held = (*beside, *teacher.model.resident, *kept, student, *answer.workspaces)
    forward = teacher.model.forward
    yield LoopPhase("teacher's forward, in every step", f"teacher: {forward.moment}", (*held, *forward.lines), DRY_RUN)
    yield training(answer, (*beside, *teacher.model.resident), teacher.read)
