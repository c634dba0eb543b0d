"""The phases of verl's PPO: actor, critic, reference model and vLLM run one after another on the same GPUs. Read, not run.

Source: verl 0.9.1, workers/engine_workers.py, ActorRolloutRefWorker, and workers/engine/fsdp/transformer_impl.py, FSDPEngine.
The model computes the logits of all tokens at once, and flash-attn's cross-entropy writes the gradient over them. The reference
model is in host memory (``CPUOffloadPolicy``); FSDP2 copies it to the GPU unit by unit.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from zeroplan.engines.precisions import widths
from zeroplan.errors import SpecError
from zeroplan.estimator import Estimate, estimate
from zeroplan.ledger import Kind, Line
from zeroplan.spec.job import JobSpec
from zeroplan.spec.model import as_scorer
from zeroplan.spec.recipe import OF_VERL
from zeroplan.workflow.forward import without_gradients
from zeroplan.workflow.options import WorkflowOptions
from zeroplan.workflow.phases import HostUse, LoopPhase, renamed
from zeroplan.workflow.preference import training
from zeroplan.workflow.rollout import STILL_THERE, Rollout, synchronisation

ENTROPY = "verl 0.9.1, utils/torch_functional.py, entropy_from_logits"
BUCKET = "verl 0.9.1, workers/rollout/vllm_rollout/bucketed_weight_transfer.py, BucketedWeightSender"
OFFLOADED = "verl 0.9.1, utils/fsdp_utils.py, offload_fsdp_model_to_cpu and offload_fsdp_optimizer"


class Trained(NamedTuple):
    """The actor or the critic, and the kinds of memory that are offloaded outside its own phases."""

    name: str
    answer: Estimate
    offloaded: frozenset[Kind]

    @property
    def stays(self) -> tuple[Line, ...]:
        """The lines that stay on the GPU outside its own phases. [bytes]"""
        held = (line for line in self.answer.held if line.kind not in self.offloaded)
        return tuple(line._replace(reason=f"{self.name}: {line.reason}") for line in held)

    @property
    def comes_back(self) -> tuple[Line, ...]:
        """The offloaded parameters, which return to the GPU for a forward or a checkpoint. [bytes]"""
        return tuple(line for line in self.answer.held if line.kind is Kind.PARAMETERS and line.kind in self.offloaded)

    def host(self, here: int) -> Iterator[HostUse]:
        """Yield its host memory while it is offloaded. [bytes]"""
        n_bytes = sum(int(line.n_bytes) for line in self.answer.held if line.kind in self.offloaded)
        if n_bytes:
            yield HostUse(f"{self.name}, offloaded", n_bytes, here, "what its rank shards", OFFLOADED)


def trained_job(job: JobSpec, options: WorkflowOptions) -> JobSpec:
    """Return the job of the actor's training step, with verl's loss; embedding and head are separate units."""
    apart = job.recipe.engine == "fsdp2" and not (job.model.positions or job.model.traits.alibi)
    fsdp2, budget = replace(job.recipe.fsdp2, ends_apart=apart), options.ppo_max_token_len_per_gpu
    batch = replace(job.batch, micro_batch_size=1, seq_len=budget) if budget else job.batch
    own = job.recipe.log_probs if job.recipe.loss == "log-probs" and job.recipe.log_probs in OF_VERL else "in place"
    kept = job.recipe.keep_logits if job.recipe.loss == "log-probs" else False
    return replace(job, recipe=replace(job.recipe, loss="log-probs", log_probs=own, keep_logits=kept, fsdp2=fsdp2), batch=batch)


def trained(job: JobSpec, options: WorkflowOptions) -> tuple[Trained, ...]:
    """Return the actor, whose job this is, and with ``gae`` the critic. [bytes]"""
    on_host = [Kind.PARAMETERS, Kind.GRADIENTS] if options.param_offload else []
    offloaded = frozenset([*on_host, *([Kind.OPTIMIZER_STATE] if options.optimizer_offload else [])])
    actor = Trained("actor", estimate(job), offloaded)
    if options.adv_estimator == "grpo":
        return (actor,)
    return actor, Trained("critic", estimate(_critic(job, options)), offloaded)


def _critic(job: JobSpec, options: WorkflowOptions) -> JobSpec:
    """Return the critic's job: the actor's but for its head, its loss and what is asked of it."""
    tokens, size = options.critic_max_token_len_per_gpu, options.critic_micro_batch_size_per_gpu or job.batch.micro_batch_size
    batch = replace(job.batch, micro_batch_size=1, seq_len=tokens) if tokens else replace(job.batch, micro_batch_size=size)
    recipe = replace(job.recipe, loss="full", keep_logits=False, recompute=options.critic_recompute or job.recipe.recompute)
    return replace(job, model=as_scorer(job.model, 1), recipe=recipe, batch=batch)


def critic_on_megatron(job: JobSpec, options: WorkflowOptions) -> Estimate | None:
    """Return the critic's training step on Megatron-Core, with its own degrees; None without a critic. [bytes]

    Source: verl b178a3cd, workers/megatron_workers.py, CriticWorker: the actor's layers, and a head with one output. Recomputation
    is off unless it is asked. Context-parallel ranks fill a dynamic batch together (workers/critic/megatron_critic.py).
    """
    if options.critic_ways is None:
        return None
    (tp, pp, cp), mesh, batch = options.critic_ways, job.mesh, job.batch
    if mesh.world_size % (tp * pp * cp):
        raise SpecError(f"a critic on tp={tp}, pp={pp} and cp={cp} ranks does not divide {mesh.world_size} GPUs")
    ways = replace(mesh, tp=tp, pp=pp, cp=cp, ep=1, dp_replicate=1, dp_shard=mesh.world_size // (tp * pp * cp))
    size, tokens = options.critic_micro_batch_size_per_gpu or batch.micro_batch_size, options.critic_max_token_len_per_gpu
    total = batch.micro_batch_size * batch.grad_accum_steps * mesh.dp_shard
    steps = replace(batch, micro_batch_size=size, grad_accum_steps=max(1, total // (size * ways.dp_shard)))
    steps = replace(steps, micro_batch_size=1, seq_len=tokens * cp) if tokens else steps
    recipe = replace(
        job.recipe, sequence_parallel=tp > 1, pipeline_layers=None, pipeline_stages_per_rank=None, recompute_layers=None,
        recompute=options.critic_recompute or "none",
        megatron=replace(job.recipe.megatron, cross_entropy_fusion_impl=None, recompute_num_layers=1),
    )  # fmt: skip
    return estimate(replace(job, model=as_scorer(job.model, 1), recipe=recipe, mesh=ways, batch=steps))


def has_reference(job: JobSpec, options: WorkflowOptions) -> bool:
    """Whether there is a separate reference model; with LoRA the actor without its adapters is the reference."""
    return bool(options.use_kl_loss) and job.model.adapter is None


def phases(models: tuple[Trained, ...], options: WorkflowOptions, rollout: Rollout) -> Iterator[LoopPhase]:
    """Yield the phases in order, without loading and saving. [bytes]"""
    actor, *rest = models
    job, stays = actor.answer.job, (*rollout.while_training, *actor.answer.workspaces)
    everyone = tuple(line for one in models for line in one.stays)
    bucket = Line(Kind.TEMPORARY, (options.update_weights_bucket_megabytes or 2048) << 20, "bucket of weights", "", BUCKET)
    loaded = actor.comes_back if job.recipe.engine == "fsdp1" else ()
    yield synchronisation(actor.answer, (*everyone, *loaded, *actor.answer.workspaces, bucket), rollout)
    yield LoopPhase("rollout", "vLLM generates", (*everyone, *actor.answer.workspaces, *rollout.awake))
    if options.log_prob_micro_batch_size_per_gpu:
        job = replace(job, batch=replace(job.batch, micro_batch_size=options.log_prob_micro_batch_size_per_gpu))
    entropy = _entropy(job, chunked=bool(options.entropy_from_logits_with_chunking))
    yield _forward("old log-probabilities", actor, job, (*everyone, *stays), (entropy,))
    if has_reference(job, options):
        on_host = replace(job.recipe, fsdp2=replace(job.recipe.fsdp2, cpu_offload=job.recipe.engine == "fsdp2"))
        forward = without_gradients(replace(job, recipe=on_host))
        yield LoopPhase("reference log-probabilities", f"reference: {forward.moment}",
                        (*everyone, *stays, *renamed(forward.lines, "reference model")))  # fmt: skip
    for critic in rest:
        own = critic.answer.job
        batch = own.batch if options.critic_micro_batch_size_per_gpu or options.critic_max_token_len_per_gpu else job.batch
        yield _forward("values", critic, replace(own, batch=batch), (*everyone, *stays), ())
    for one in (*rest, actor):
        others = tuple(line for other in models if other is not one for line in other.stays)
        step = training(one.answer, (*others, *rollout.while_training))
        yield step._replace(name=f"update of the {one.name}", compared_with="")


def with_rewards(phases: tuple[LoopPhase, ...]) -> tuple[LoopPhase, ...]:
    """Return the phases beside a second vLLM with the reward model, asleep. Leaves out the phase in which it scores. [bytes]

    Source: verl b178a3cd, experimental/reward_loop/reward_model.py, RewardModelManager.
    """
    asleep = STILL_THERE._replace(reason=f"reward model: {STILL_THERE.reason}")
    return (phases[0], *(one._replace(lines=(*one.lines, asleep)) for one in phases[1:]))


def _forward(name: str, one: Trained, job: JobSpec, held: tuple[Line, ...], at_head: tuple[Line, ...]) -> LoopPhase:
    """The phase of a trained model's forward, for which offloaded parameters return to the GPU."""
    forward = without_gradients(job, at_head=at_head)
    return LoopPhase(name, f"{one.name}: {forward.moment}", (*held, *one.comes_back, *renamed(forward.lines, one.name)))


def _entropy(job: JobSpec, *, chunked: bool) -> Line:
    """The entropy's softmax and its product with the logits; ``chunked``: both and the logits in fp32, for 2,048 tokens."""
    tokens = job.batch.micro_batch_size * job.batch.seq_len
    n_bytes = 12 * min(tokens, 2048) if chunked else 2 * widths(job.recipe.precision).compute * tokens
    return Line(Kind.LOGITS, n_bytes * job.model.vocab_size, "entropy: softmax and products", "", ENTROPY)
