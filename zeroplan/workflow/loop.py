"""Which phases does a workflow have, and what stays on the GPU between them? Start at :func:`loop_of`."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from zeroplan.engines.precisions import widths
from zeroplan.errors import SpecError
from zeroplan.estimator import Estimate, estimate
from zeroplan.ledger import Kind, Line
from zeroplan.spec.job import JobSpec
from zeroplan.workflow import distilling, preference, verl
from zeroplan.workflow.distilling import Teacher, scorer_of, teacher_of
from zeroplan.workflow.forward import without_gradients
from zeroplan.workflow.generating import generation
from zeroplan.workflow.loading import host, loading, saving
from zeroplan.workflow.options import OPTIONS, WORKFLOWS, WorkflowOptions
from zeroplan.workflow.phases import DRY_RUN, Loop, LoopPhase, renamed
from zeroplan.workflow.reference import Reference, bytes_of_a_logit, reference_of
from zeroplan.workflow.rollout import BLOCK_TOKENS, Rollout, asleep, buffered, rollout_of, synchronisation

_ENGINES = ("fsdp2", "fsdp1", "ddp", "deepspeed")
GENERATIONS = 8
"""trl 1.16, trainer/grpo_config.py, GRPOConfig.num_generations."""


class _Parts(NamedTuple):
    """The models and the rollout engine of a workflow."""

    answer: Estimate
    reference: Reference | None
    rollout: Rollout | None
    teacher: Teacher | None = None
    """With a teacher, its model is the ``reference``."""
    scorer: Teacher | None = None
    """A teacher that scores rollouts beside the reference model."""


def loop_of(job: JobSpec, options: WorkflowOptions) -> Loop:
    """Return the phases of a workflow with this job as its training step. [bytes]

    Raises :class:`~zeroplan.errors.SpecError` for an engine or parallelism that TRL's trainers do not support, and for impossible
    numbers.
    """
    return loop_of_step(step_of(job, options), options)


def step_of(job: JobSpec, options: WorkflowOptions) -> JobSpec:
    """Return the training step that the workflow's trainer makes of a job: its loss, and two sequences of a pair.

    Raises what :func:`loop_of` raises.
    """
    _check(job, options)
    return (verl.trained_job if options.workflow == "ppo" else preference.trained_job)(job, options)


def loop_of_step(job: JobSpec, options: WorkflowOptions) -> Loop:
    """Return the phases of a workflow with exactly this training step, as another program's file describes it. [bytes]

    Raises what :func:`loop_of` raises.
    """
    _check(job, options)
    if job.recipe.engine == "megatron" and (options.workflow != "ppo" or options.critic_ways is not None):
        return _of_megatron(job, options)
    if options.workflow == "ppo":
        return _of_verl(job, options)
    answer = estimate(job)
    kind = WORKFLOWS[options.workflow]
    compares = kind.compares or bool(options.beta)
    teacher = teacher_of(answer.job, options.teacher_model) if kind.log_probs == "divergence" else None
    each = bytes_of_a_logit(options.workflow) if options.full_logits else 0
    reference = reference_of(answer.job, all_logits=each) if compares else teacher and teacher.model
    rollout = rollout_of(job, options, answer.parameters) if _generates_here(options) else None
    parts = _Parts(answer, reference, rollout, teacher, scorer_of(answer.job, options))
    resident = _resident(parts, options)
    made = _of_rollouts(parts, options, resident) if kind.generates else preference.phases(answer, reference, options)
    copy = _copy_at_first(reference, options, answer)
    beside = 0 if not copy else answer.parameters if teacher is None else teacher.parameters
    if parts.scorer is not None:
        copy, beside = (*copy, *parts.scorer.model.resident), beside + parts.scorer.parameters
    full, efficient = bool(options.full_state_dict), bool(options.fsdp_cpu_ram_efficient_loading)
    stays = () if rollout is None else rollout.while_training
    first = loading(answer, copy, efficient=efficient)
    if kind.generates:  # vLLM starts before the reference model is sharded, and then sleeps if sleep mode is on
        first = first._replace(lines=(*first.lines, *stays), compared_with="")
    synced = _sync(answer, (*resident, *stays)) if options.sync_ref_model else ()
    phases = (first, *made, *synced, saving(answer, (*resident, *stays), full=full))
    if not _ran(job, options, rollout):
        phases = tuple(one._replace(compared_with="") for one in phases)
    sleeping = () if rollout is None else asleep(rollout, answer.ranks_per_node or job.mesh.world_size)
    memory = (*host(answer, beside=beside, efficient=efficient, full=full), *sleeping)
    return Loop(options.workflow, answer, phases, resident, memory, tuple(_notes(parts, options)))


def loop_of_file(job: JobSpec, said: Mapping[str, object]) -> Loop:
    """Return the fine-tuning loop that another program's file describes, with this job as its training step. [bytes]

    ``said``: :attr:`zeroplan.resolve.Resolved.loop`. Raises what :func:`loop_of` raises.
    """
    return loop_of_step(job, WorkflowOptions(**{name: value for name, value in said.items() if name != "alone"}))  # type: ignore[arg-type]


def _of_megatron(job: JobSpec, options: WorkflowOptions) -> Loop:
    """The loop of ms-swift's and verl's trainers on Megatron-Core.

    Every rank holds the reference model's share in 16 bits: ms-swift's always (megatron/trainers/rlhf_mixin.py,
    MegatronRLHFTrainer.prepare_model), verl's unless it is offloaded (workers/megatron_workers.py). Models score with the layers
    of the training step and save nothing, so that a scoring forward never needs more than the step.
    """
    answer = estimate(job)
    weights = tuple(line for line in answer.states if line.kind is Kind.PARAMETERS)
    kept = WORKFLOWS[options.workflow].compares or options.keeps_reference
    critic, copy = verl.critic_on_megatron(job, options), _beside_on_megatron(job, options, weights if kept else ())
    of_critic = () if critic is None else tuple(line._replace(reason=f"critic: {line.reason}") for line in critic.held)
    others = (*copy, *(of_critic if options.critic_stays else ()))
    rollout = rollout_of(job, options, answer.parameters) if _generates_here(options) else None
    resident, stays = (*others, *answer.held, *answer.workspaces), () if rollout is None else rollout.while_training
    made = [loading(answer, others, efficient=False)]
    between = () if options.offloads_between_updates else answer.held
    if rollout is not None:
        here = (*others, *between, *answer.workspaces)
        made += [synchronisation(answer, (*here, *(weights if options.offloads_between_updates else ())), rollout)]
        made += [LoopPhase("rollout", "vLLM generates", (*here, *rollout.awake))]
    if critic is not None:
        made += [preference.training(critic, (*copy, *between, *stays))._replace(name="update of the critic")]
    batch_line = [_buffered(job, options, compares=True)] if WORKFLOWS[options.workflow].generates else []
    made += [preference.training(answer, (*others, *stays, *batch_line)), saving(answer, (*resident, *stays), full=False)]
    made = list(verl.with_rewards(tuple(made))) if options.reward_engine else made
    phases = tuple(one._replace(compared_with="") for one in made)
    beside = answer.parameters * kept + (0 if critic is None else critic.parameters)
    memory = (*host(answer, beside=beside, efficient=False, full=False),
              *(() if rollout is None else asleep(rollout, answer.ranks_per_node or job.mesh.world_size)))  # fmt: skip
    notes = ("ms-swift's and verl's trainers on Megatron-Core, read and not run.",
             *(() if rollout is None else _of_the_engine(rollout, answer.job, options)))  # fmt: skip
    return Loop(options.workflow, answer, phases, resident, memory, notes)


def _beside_on_megatron(job: JobSpec, options: WorkflowOptions, weights: tuple[Line, ...]) -> tuple[Line, ...]:
    """Return the reference model's weights, and with pipelines what waits for its layers beside the trained model's. [bytes]"""
    copy = tuple(line._replace(reason=f"reference model: {line.reason}") for line in weights)
    if job.mesh.pp == 1 or _generates(options):
        return copy
    if (job.recipe.pipeline_stages_per_rank or 1) > 1:  # outputs of all models travel and wait together
        raise SpecError(f"workflow {options.workflow} with several pipeline stages on a rank is not modelled; use one")
    width, batch, others = widths(job.recipe.precision).compute, job.batch, 3 if options.workflow == "kto" else 1
    each = width * batch.micro_batch_size * batch.seq_len * job.model.hidden_size // job.mesh.cp
    reason = "inputs of the other models' layers, received with the trained model's"
    return (*copy, Line(Kind.ACTIVATIONS, (job.mesh.pp - 1) * others * each, reason, "", _TOGETHER))


def _generates(options: WorkflowOptions) -> bool:
    return WORKFLOWS[options.workflow].generates or options.workflow == "ppo"


def _generates_here(options: WorkflowOptions) -> bool:
    return _generates(options) and options.vllm_mode != "server" and not options.by_transformers


_TOGETHER = "ms-swift 3602360a, megatron/trainers/dpo_trainer.py and kto_trainer.py, forward_step"


def _of_verl(job: JobSpec, options: WorkflowOptions) -> Loop:
    """The loop of verl's PPO; its training step is the actor's."""
    if not job.recipe.engine.startswith("fsdp") or job.mesh.dp_shard == 1:
        raise SpecError("workflow ppo models verl's FSDP workers; use --engine fsdp2 or fsdp1 on several GPUs")
    models = verl.trained(job, options)
    answer, full = models[0].answer, bool(options.full_state_dict)
    rollout = rollout_of(job, options, answer.parameters)
    stays = (*(line for one in models for line in one.stays), *answer.workspaces, *rollout.while_training)
    others = sum(one.answer.parameters for one in models[1:]) + verl.has_reference(job, options) * answer.parameters
    efficient = bool(options.fsdp_cpu_ram_efficient_loading)
    first = loading(models[-1].answer, (), efficient=efficient)
    actor = tuple(line for line in answer.held if line.kind is Kind.PARAMETERS)
    first = first._replace(lines=(*actor, *first.lines) if len(models) > 1 else first.lines)
    made = (first, *verl.phases(models, options, rollout), saving(answer, (*stays, *models[0].comes_back), full=full))
    if options.reward_engine:
        made = verl.with_rewards(made)
    here = answer.ranks_per_node or job.mesh.world_size
    memory = [*host(answer, beside=others, efficient=efficient, full=full), *asleep(rollout, here)]
    reference = [models[0]._replace(name="reference model", offloaded=frozenset({Kind.PARAMETERS}))] * verl.has_reference(
        job, options
    )
    memory += [use for one in (*models, *reference) for use in one.host(here)]
    notes = (
        "verl 0.9.1 with its FSDP workers, read and not run.",
        (
            "A reward model of verl's is an engine of its own. Asleep on the same GPUs it is counted as vLLM asleep; while it "
            "scores, it takes its share of the GPU, and that phase is not counted."
        ),
        *_of_the_engine(rollout, answer.job, options),
    )
    phases = tuple(one._replace(compared_with="") for one in made)
    return Loop(options.workflow, answer, phases, stays, tuple(memory), notes)


def _ran(job: JobSpec, options: WorkflowOptions, rollout: Rollout | None) -> bool:
    """Whether TRL's trainer ran in a dry run with this engine and stage; it never ran beside vLLM."""
    recipe = job.recipe
    where = "one GPU" if job.mesh.world_size == 1 else f"{recipe.engine} {recipe.zero_stage}"
    return rollout is None and where in WORKFLOWS[options.workflow].ran


def _resident(parts: _Parts, options: WorkflowOptions) -> tuple[Line, ...]:
    """The lines that stay on the GPU between phases."""
    copy = () if parts.reference is None or options.precompute_ref_log_probs else parts.reference.resident
    scorer = () if parts.scorer is None else parts.scorer.model.resident
    return (*copy, *scorer, *parts.answer.held, *parts.answer.workspaces)


def _copy_at_first(reference: Reference | None, options: WorkflowOptions, answer: Estimate) -> tuple[Line, ...]:
    """The reference model's copy at the start; with precomputed log-probabilities only FSDP needs one."""
    if reference is None or (options.precompute_ref_log_probs and not answer.job.recipe.engine.startswith("fsdp")):
        return ()
    return tuple(line for line in reference.resident if line.kind is Kind.PARAMETERS)


def _sync(answer: Estimate, resident: tuple[Line, ...]) -> Iterator[LoopPhase]:
    """Yield the phase that mixes the trained weights into the reference model's.

    It is in place, but DeepSpeed's stage 3 first gathers both models whole on every rank. Raises SpecError for adapters, which TRL
    refuses too.
    """
    job = answer.job
    if job.model.adapter is not None:
        raise SpecError("--sync-ref-model needs a reference model of its own, and adapters have none; leave one of them out")
    whole: tuple[Line, ...] = ()
    if job.recipe.engine == "deepspeed" and job.recipe.zero_stage == 3:
        width, moved = widths(job.recipe.precision).compute, answer.parameters
        reason = "both models, gathered whole"
        whole = (Line(Kind.UNSHARDED_PARAMETERS, 2 * width * moved, reason, f"2·{width}·Ψ", _SYNCED),)
    yield LoopPhase("reference update", "the weights are mixed", (*resident, *whole))


_SYNCED = "trl 1.16, trainer/callbacks.py, SyncRefModelCallback.sync_target_model"


def _of_rollouts(parts: _Parts, options: WorkflowOptions, resident: tuple[Line, ...]) -> Iterator[LoopPhase]:
    """Yield the phases in order: weights go to vLLM, which generates; models score; the model trains."""
    answer, reference, rollout, teacher, scorer = parts
    batch = _buffered(answer.job, options, compares=reference is not None and teacher is None)
    stays = () if rollout is None else rollout.while_training
    if rollout is not None:
        yield synchronisation(answer, resident, rollout)
        yield LoopPhase("rollout", "vLLM generates", (*resident, *rollout.awake))
    elif options.by_transformers:
        yield generation(answer, preference.prompt_len(answer.job, options), _rows(answer.job, options), resident)
    if teacher is not None:
        yield from distilling.phases(answer, teacher, (*stays, batch))
        return
    forward = without_gradients(answer.job)
    lines = (*resident, *stays, batch, *renamed(forward.lines, "scored"))
    yield LoopPhase("old log-probabilities", f"scored: {forward.moment}", lines, DRY_RUN)
    if reference is not None:
        scoring = (*resident, *stays, batch, *reference.forward.lines)
        yield LoopPhase("reference log-probabilities", f"reference: {reference.forward.moment}", scoring, DRY_RUN)
    if scorer is not None:
        forward = scorer.model.forward
        lines = (*resident, *stays, batch, *forward.lines)
        yield LoopPhase("teacher's log-probabilities", f"teacher: {forward.moment}", lines)
    models = (reference, None if scorer is None else scorer.model)
    copies = tuple(line for one in models if one is not None for line in one.resident)
    yield preference.training(answer, (*copies, *stays, batch))


def _rows(job: JobSpec, options: WorkflowOptions) -> int:
    """Return the sequences that a rank generates at once: those of all micro-batches until the next rollout."""
    return (options.steps_per_generation or job.batch.grad_accum_steps) * job.batch.micro_batch_size


def _buffered(job: JobSpec, options: WorkflowOptions, *, compares: bool) -> Line:
    steps, prompt = options.steps_per_generation or job.batch.grad_accum_steps, preference.prompt_len(job, options)
    return buffered(job, prompt, job.batch.seq_len - prompt, steps, scored=3 + compares if options.workflow == "grpo" else 0)


def _notes(parts: _Parts, options: WorkflowOptions) -> Iterator[str]:
    yield "TRL 1.16 on accelerate 1.15."
    if parts.answer.job.recipe.prompt_len == 1 and options.workflow in OPTIONS["max_completion_length"].of:
        yield "zeroplan assumes that all tokens but the first are scored. If prompts are not, set --max-completion-length."
    if widths(parts.answer.job.recipe.precision).stored == 2:
        yield "A checkpoint in 16 bits is mapped: all processes of a node share its pages until they write to them."
    if parts.teacher is not None and parts.answer.job.recipe.engine != "deepspeed":
        yield "Every rank has the whole teacher: accelerate shards no model that is only evaluated. DeepSpeed's stage 3 shards it."
    if parts.teacher is not None and parts.answer.job.recipe.precision == "fp32":
        yield "The loss calls the student past accelerate's autocast, so that without FSDP or DeepSpeed it computes in fp32."
    if parts.rollout is not None:
        yield from _of_the_engine(parts.rollout, parts.answer.job, options)
    if options.workflow == "grpo":
        yield "Reward functions take no GPU memory here. A reward model is one more copy of its weights in every phase."


def _of_the_engine(rollout: Rollout, job: JobSpec, options: WorkflowOptions) -> Iterator[str]:
    sequences = job.batch.micro_batch_size * (options.steps_per_generation or job.batch.grad_accum_steps)
    sequences *= options.split
    needed = sequences * -(-job.batch.seq_len // BLOCK_TOKENS)
    yield (
        f"vLLM's KV cache: at most {rollout.blocks:,} blocks of {BLOCK_TOKENS} tokens, {rollout.block_bytes:,} bytes each; the "
        f"{sequences:,} sequences of a rollout fill {needed:,} at their longest. vLLM's profiling run takes its activations and "
        "CUDA graphs off that."
    )
    if rollout.sleeps:
        yield (
            f"vLLM sleeps while the model trains (level {rollout.level}): its weights and its KV cache leave the GPU. CUDA graphs, "
            "buffers of libraries and its allocator's cache stay. No formula gives them: the largest figure of two public logs is "
            "counted, 6.95 GiB, CUDA context included (the other has 4.75 GiB)."
        )


def _check(job: JobSpec, options: WorkflowOptions) -> None:
    recipe, mesh = job.recipe, job.mesh
    on_megatron = recipe.engine == "megatron" and (bool(options.full_logits) or options.critic_ways is not None)  # a file's
    for refused, instead in (
        (recipe.engine not in _ENGINES and not on_megatron and f"engine {recipe.engine!r}", f"one of {', '.join(_ENGINES)}"),
        (
            mesh.tp * mesh.cp * mesh.pp * mesh.ep > 1 and not on_megatron and "ranks that split the model or a sequence",
            "--gpus alone",
        ),
        (job.model.profile is not None and "a profile", "a model of a known family"),
    ):
        if refused:
            raise SpecError(f"workflow {options.workflow} with {refused} is not modelled; use {instead}")
    if options.workflow == "grpo" and not on_megatron:  # whose programs count a step's rollouts in their own ways
        _check_rollout(job, options)


def _check_rollout(job: JobSpec, options: WorkflowOptions) -> None:
    batch = job.batch
    steps, generations = options.steps_per_generation or batch.grad_accum_steps, options.num_generations or GENERATIONS
    generated = batch.micro_batch_size * job.mesh.world_size * steps
    if generated % generations:
        raise SpecError(
            f"a rollout of {generated:,} completions (micro-batch x GPUs x steps per generation) is not divisible by "
            f"--num-generations {generations}; change one of them"
        )
