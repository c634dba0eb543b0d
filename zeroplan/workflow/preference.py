"""The phases of preference and supervised fine-tuning: one trained model, and for some workflows a reference model."""

from collections.abc import Iterator
from dataclasses import replace

from zeroplan.errors import SpecError
from zeroplan.estimator import Estimate
from zeroplan.ledger import Kind, Line, Phase
from zeroplan.resolve import COMPLETION
from zeroplan.spec.job import JobSpec
from zeroplan.spec.model import as_scorer
from zeroplan.spec.recipe import WITH_TEACHERS_LOGITS, Loss
from zeroplan.workflow.forward import held_after_forward
from zeroplan.workflow.options import WORKFLOWS, WorkflowOptions
from zeroplan.workflow.phases import DRY_RUN, LoopPhase
from zeroplan.workflow.reference import Reference


def trained_job(job: JobSpec, options: WorkflowOptions) -> JobSpec:
    """Return the job of the training step: with TRL's loss, and two sequences per example for pairs."""
    kind = WORKFLOWS[options.workflow]
    model, loss = job.model, _loss(job, options)
    kept = job.recipe.keep_logits if loss == "full" else False  # in tiles, logits are never whole
    own = job.recipe.log_probs if job.recipe.log_probs in WITH_TEACHERS_LOGITS else kind.log_probs
    if own == "pairs" and job.recipe.engine in ("fsdp2", "deepspeed"):  # accelerate leaves their outputs in 16 bits
        own = "pairs in 16 bits"
    recipe = replace(job.recipe, loss=loss, prompt_len=prompt_len(job, options), log_probs=own, keep_logits=kept)
    if (
        kind.log_probs == "divergence" and recipe.engine == "ddp" and recipe.precision != "bf16"
    ):  # the loss calls the student's forward outside autocast
        recipe = replace(recipe, precision="fp32")
    model = as_scorer(model, kind.head_rows)
    if recipe.engine == "fsdp2":  # like accelerate 1.15, which TRL's trainers use
        apart = not (model.positions or model.traits.alibi or loss == "fused")  # one unit is an upper bound
        recipe = replace(recipe, fsdp2=replace(recipe.fsdp2, ends_apart=apart, reduce_dtype="param"))
    batch = replace(job.batch, micro_batch_size=kind.sequences * job.batch.micro_batch_size)
    return replace(job, model=model, recipe=recipe, batch=batch)


def _loss(job: JobSpec, options: WorkflowOptions) -> Loss:
    """Return the loss of the training step; raises SpecError for a job's loss that the trainer does not have."""
    usual, loss = WORKFLOWS[options.workflow].loss, job.recipe.loss
    if options.full_logits:
        return "full"
    if loss in ("full", usual):
        return usual
    if options.workflow == "sft":
        return loss
    raise SpecError(f"--loss {loss}: the loss of workflow {options.workflow} is {usual}; leave --loss out")


def prompt_len(job: JobSpec, options: WorkflowOptions) -> int:
    """Return the number of tokens that are not scored; by default only the first token of a sequence is not. [tokens]"""
    completion = options.max_completion_length or (
        COMPLETION if WORKFLOWS[options.workflow].generates else job.batch.seq_len - 1
    )
    if completion >= job.batch.seq_len:
        raise SpecError(
            f"--max-completion-length {completion:,} leaves no prompt in --seq-len {job.batch.seq_len:,}, which is both; use a "
            "longer --seq-len"
        )
    return job.batch.seq_len - completion


def phases(answer: Estimate, reference: Reference | None, options: WorkflowOptions) -> Iterator[LoopPhase]:
    """Yield the phases in order, without loading and saving. [bytes]"""
    if reference is None:
        yield training(answer, ())
        return
    scoring = f"reference: {reference.forward.moment}"
    if options.precompute_ref_log_probs:
        before = (*_alone(answer, reference), *answer.workspaces)
        yield LoopPhase("reference log-probabilities, once", scoring, (*before, *reference.forward.lines), DRY_RUN)
        yield training(answer, ())
        return
    held = (*reference.resident, *held_after_forward(answer), *answer.workspaces)
    yield LoopPhase("reference log-probabilities, in every step", scoring, (*held, *reference.forward.lines), DRY_RUN)
    yield training(answer, reference.resident)


def _alone(answer: Estimate, reference: Reference) -> tuple[Line, ...]:
    """The scoring model's lines before training. Under FSDP it is a copy, since the trained model is not sharded yet."""
    weights = tuple(line for line in answer.states if line.kind is Kind.PARAMETERS)
    return reference.resident if answer.job.recipe.engine.startswith("fsdp") and reference.resident else weights


def training(answer: Estimate, beside: tuple[Line, ...], in_loss: tuple[Line, ...] = ()) -> LoopPhase:
    """Return the training step with the lines ``beside``, and with ``in_loss`` at moments of the loss. [bytes]"""
    moments = [moment for moment in answer.engine_moments if moment.phase is not Phase.INIT]
    at_loss = (any(line.kind is Kind.LOGITS for line in one.lines) for one in moments)
    moments = [one._replace(lines=(*one.lines, *in_loss)) if at else one for one, at in zip(moments, at_loss, strict=True)]
    peak = max(moments, key=lambda moment: int(moment.total_bytes))
    return LoopPhase("training step", peak.name, (*beside, *peak.lines, *answer.workspaces), DRY_RUN)
