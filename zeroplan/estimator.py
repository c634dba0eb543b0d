"""How much memory does one GPU need for this job, when, why, and does it fit? The one call that everything above makes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import import_module
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, cast

from zeroplan.engines.account import Account, PipelineRank, Symbol
from zeroplan.engines.device import Outside, allocator_room, outside, reserved_as_seen, total_band, workspace_lines
from zeroplan.engines.optimizers import implementation_of
from zeroplan.engines.precisions import compute_of, widths
from zeroplan.engines.reserved_shares import missed_by
from zeroplan.ledger import Band, Kind, Line, Moment, Phase, Role, bytes_by_kind, total_bytes
from zeroplan.measurement import SETTINGS, AllocatorSettings
from zeroplan.memo import recalled
from zeroplan.numeric import Int, ceil_div, maximum
from zeroplan.spec.batch import Batch
from zeroplan.spec.hardware import node_size
from zeroplan.spec.job import JobSpec
from zeroplan.spec.mesh import Mesh
from zeroplan.spec.model import ModelSpec
from zeroplan.spec.recipe import ON_PAPER, Engine, OptimizerImpl, RecipeSpec
from zeroplan.spec.vision import VisionSpec
from zeroplan.timeline import Sizes, peak, reserved, sizes_of, under_pressure
from zeroplan.traffic import Traffic, traffic
from zeroplan.transformer.activations import approximation
from zeroplan.transformer.head import output_bytes
from zeroplan.transformer.legend import legend
from zeroplan.transformer.params import active_parameter_count, has_frozen, parameter_count, trained_count
from zeroplan.transformer.recomputed import first_recomputed
from zeroplan.transformer.vision import weights_alone
from zeroplan.units import format_size

if TYPE_CHECKING:
    from zeroplan.replay import StepReplay


class EngineModule(Protocol):
    """What every module of ``zeroplan.engines`` named after an engine offers."""

    def account(self, model: ModelSpec, recipe: RecipeSpec, mesh: Mesh, batch: Batch) -> Account:
        """Memory and traffic of one rank."""
        ...


def engine_module(engine: Engine) -> EngineModule:
    """Load one engine; the others stay on disk, since start-up is part of the time to an answer."""
    return cast("EngineModule", import_module(f"zeroplan.engines.{engine}"))


def step_implementation(recipe: RecipeSpec) -> OptimizerImpl | None:
    """How the optimizer steps under this recipe: what was requested, or the engine's default; None on paper.

    >>> step_implementation(RecipeSpec()), step_implementation(RecipeSpec(engine="paper"))
    ('foreach', None)
    """
    return None if recipe.engine in ON_PAPER else implementation_of(recipe)


#: The model states of the ZeRO paper (arXiv:1910.02054, section 3.1), in its order; an engine may hold buffers beside them.
MODEL_STATES = (Kind.PARAMETERS, Kind.GRADIENTS, Kind.OPTIMIZER_STATE)

Verdict = Literal["fits", "tight", "does not fit", "unknown"]


@dataclass(frozen=True, kw_only=True)  # without slots, which would leave no place for what is worked out once
class Estimate:
    """The memory account of one GPU (rank 0) in the steady state of a training step. All sizes in bytes."""

    job: JobSpec
    """The job, complete."""
    parameters: int
    """All parameters, tied ones once."""
    active_parameters: int
    """Those that one token uses."""
    states: tuple[Line, ...]
    """Parameters, gradients and optimizer state as the engine keeps them."""
    engine_moments: Sequence[Moment]
    """Every named moment of the step with the engine's own lines."""
    workspaces: tuple[Line, ...]
    """What libraries hold at all of them."""
    peak: Moment
    """The largest moment, workspaces included: what ``torch.cuda.max_memory_allocated`` would say."""
    outside: tuple[Outside, ...]
    """What the card gives to the context and to communicators."""
    host: tuple[Line, ...]
    """Host memory per rank, empty unless something is offloaded."""
    nvme: tuple[Line, ...]
    """Files on NVMe per rank, likewise."""
    traffic: Traffic
    """What one GPU sends in a step."""
    symbols: tuple[Symbol, ...]
    """What the engine's formulas use beyond the model's legend."""
    approximate: str
    """Which part is not exact for this architecture, in a sentence; empty otherwise."""
    notes: tuple[str, ...]
    """What a reader would trip over, a sentence each."""
    kept: tuple[tuple[str, tuple[Line, ...]], ...]
    """The kind of each block and what one of it keeps for its backward, where the moments give it as one line."""
    pipeline: tuple[PipelineRank, ...] = ()
    """Every rank of a pipeline, the one that this estimate is of first."""
    replay: "StepReplay | None" = None
    """The first steps request by request, where they were requested; what is reserved then follows from them."""
    longest_bytes: int = 0
    """What is comfortable with the longest sequences that there may be, where lengths were drawn; else 0. [bytes]"""

    def __repr__(self) -> str:
        """Return the answer in a line: all fields with every line of every moment would fill a hundred screens."""
        job, ranks = self.job, self.job.mesh.world_size
        name = job.model.name or job.model.family
        asked = f"{name!r}, {job.recipe.engine}, ZeRO stage {job.recipe.zero_stage}, ranks={ranks}"
        return f"<Estimate of {asked}: peak {format_size(self.peak_bytes)} at {self.peak.name!r}, {self.verdict}>"

    @property
    def legend(self) -> dict[str, int]:
        """The number of every symbol that the formulas of the lines use."""
        job = self.job
        shared = job.mesh.cp if job.recipe.engine == "fsdp2" else 1
        batch = job.batch if shared == 1 else replace(job.batch, seq_len=job.batch.seq_len // shared)
        of_the_model = legend(job.model, compute_of(job.recipe), batch, tp=job.mesh.tp)
        common = {"Ψ": self.parameters, "L": job.model.num_hidden_layers, "N": job.mesh.dp_shard}
        symbols = {**common, **of_the_model, **{symbol.name: symbol.value for symbol in self.symbols}}
        return {name: int(value) for name, value in symbols.items()}

    @property
    def states_by_kind(self) -> dict[Kind, int]:
        """Bytes of parameters, gradients and optimizer state."""
        by_kind = bytes_by_kind(self.states)
        return {kind: int(by_kind.get(kind, 0)) for kind in MODEL_STATES}

    @property
    def trained_parameters(self) -> int:
        """Parameters that get gradients: all of them, or those of the adapters."""
        return trained_count(self.job.model)

    @property
    def peak_bytes(self) -> int:
        """The highest memory that the caching allocator has allocated."""
        return int(self.peak.total_bytes)

    @cached_property
    def moments(self) -> tuple[Moment, ...]:
        """Every named moment with all that is alive then, library workspaces included."""
        return tuple(moment._replace(lines=(*moment.lines, *self.workspaces)) for moment in self.engine_moments)

    @cached_property
    def _sizes(self) -> Sizes:
        """What the moments say of the allocator's blocks, from which :meth:`reserved_with` and :meth:`under_pressure` follow."""
        return sizes_of(self.moments, self.job.recipe)

    @cached_property
    def reserved(self) -> Band:
        """What the caching allocator takes around the peak, with its default settings, on a card that never runs out."""
        return self.reserved_with("default")

    def reserved_with(self, settings: AllocatorSettings) -> Band:
        """What it takes with its default settings, or with expandable segments. [bytes]

        What recorded jobs of the engine say. A replay of the step's requests (:mod:`zeroplan.replay`), where there is one, says the
        least and the expected; the most stays, since programs on GPUs reserve for more than their steps.
        """
        of_records = _reserved(self._sizes, self.job, settings)
        if self.replay is None:
            return of_records
        least, expected, most = self.replay.band(settings)
        return Band(least, expected, maximum(most, of_records.high_bytes))

    def under_pressure(self, settings: AllocatorSettings = "default") -> Band:
        """In how much room the job runs where the card is full, and the allocator gives cached blocks back. [bytes]

        At least the peak; expected and most with what it cannot give back, since a block in use lies in the same segment.
        """
        return under_pressure(self._sizes, self.job.recipe, settings)

    @property
    def allocator_room_bytes(self) -> int | None:
        """What the GPU has for the allocator, context and communicators taken off; None where no GPU is named."""
        return allocator_room(self.job.mesh, self.job.cluster.gpu)

    @property
    def held(self) -> tuple[Line, ...]:
        """What the engine holds from step to step: the lines that are there when a step ends and at every moment until the next.

        During the optimizer's step DeepSpeed's stage 3 releases small parameters, and gathers them again at its end.
        """
        last = [moment.lines for moment in self.engine_moments if moment.phase is Phase.STEP][-1]
        until = [moment.lines for moment in self.engine_moments if moment.phase not in (Phase.INIT, Phase.STEP)]
        left = tuple(line for line in last if line.tag.role is Role.UNTIL_NEXT_STEP)
        return (*(line for line in until[0] if line in last and all(line in lines for lines in until)), *left)

    @property
    def outside_band(self) -> Band:
        """Context and communicators together."""
        return total_band(self.outside)

    @property
    def host_bytes(self) -> int:
        """Host memory per rank, where something is offloaded."""
        return int(total_bytes(self.host))

    @property
    def ranks_per_node(self) -> int | None:
        """GPUs of this job that share a node, where the cluster or its GPU says how many there are."""
        known = node_size(self.job.cluster)
        return None if known is None else min(known, self.job.mesh.world_size)

    @property
    def host_bytes_per_node(self) -> int | None:
        """Host memory of a node, where it is known how many ranks share one."""
        return None if self.ranks_per_node is None else self.host_bytes * self.ranks_per_node

    @property
    def nvme_bytes(self) -> int:
        """Files on NVMe per rank, where something is offloaded there."""
        return int(total_bytes(self.nvme))

    @property
    def nvme_bytes_per_node(self) -> int | None:
        """Files on NVMe of a node, where it is known how many ranks share one."""
        return None if self.ranks_per_node is None else self.nvme_bytes * self.ranks_per_node

    @property
    def bytes_on_slowest_link(self) -> int:
        """What one GPU sends per step without what stays among ranks that may share a node: tensor-parallel ones, ZeRO++'s."""
        ranks, calls = self.job.mesh.world_size, self.traffic.collectives
        return int(self.traffic.total_bytes) - sum(int(call.sent_bytes) for call in calls if call.near and call.group != ranks)

    @property
    def capacity_bytes(self) -> int | None:
        """What torch reports as the GPU's memory; None where no GPU is named."""
        gpu = self.job.cluster.gpu
        return None if gpu is None else int(gpu.memory_bytes.value)

    @property
    def least_bytes(self) -> int:
        """What must fit: the allocated peak and the expected context and communicators.

        Cached blocks do not count: the allocator gives them back before it runs out of memory, as far as it can
        (:meth:`under_pressure`).
        """
        return self.peak_bytes + int(self.outside_band.expected_bytes)

    @property
    def comfortable_bytes(self) -> int:
        """What fits without the allocator having to give back cached blocks: expected reserved plus what is outside.

        Where lengths of sequences were drawn, that of the longest that they may have. Where runs of such jobs went beyond their
        estimates, at least as much as the furthest of them.
        """
        return max(self._own_comfortable_bytes, self.longest_bytes)

    @property
    def _own_comfortable_bytes(self) -> int:
        reserved = int(_with_missed(self.reserved.expected_bytes, self.peak_bytes, self.job))
        return reserved + int(self.outside_band.expected_bytes)

    @property
    def is_tight_by_length(self) -> bool:
        """Whether the job is ``tight`` only since sequences may be longer than those that were drawn."""
        capacity = self.capacity_bytes
        return capacity is not None and self._own_comfortable_bytes <= capacity < self.longest_bytes

    @property
    def verdict(self) -> Verdict:
        """Whether the job fits the GPU: ``tight`` where it fits only if the allocator's cache stays small.

        A job whose replay runs out of memory with either setting of the allocator does not fit, whatever its peak.
        """
        found = verdict(self.least_bytes, self.comfortable_bytes, self.capacity_bytes)
        if found == "does not fit" or any(self.goes_through(settings) for settings in SETTINGS):
            return found
        return "does not fit"

    def goes_through(self, settings: AllocatorSettings) -> bool:
        """Whether the replayed step does not run out of memory on the GPU; true without a replay or a GPU."""
        room = self.allocator_room_bytes
        return self.replay is None or room is None or self.replay.on_card(room, settings).fits

    @property
    def needs_expandable_segments(self) -> bool:
        """Whether the replayed step runs out of memory with the allocator's default settings, and not with expandable segments."""
        return not self.goes_through("default") and self.goes_through("expandable_segments")

    @property
    def fits(self) -> bool | None:
        """True for ``fits`` and ``tight``; None where no GPU is named."""
        return None if self.capacity_bytes is None else self.verdict != "does not fit"

    @property
    def room_bytes(self) -> int | None:
        """Capacity left beside the peak and what is outside the allocator; negative where it does not fit."""
        capacity = self.capacity_bytes
        return None if capacity is None else capacity - self.least_bytes


def estimate(job: JobSpec, *, pipeline_rank: int | None = None, replay: bool = False) -> Estimate:
    """Account for the memory and traffic of one GPU under this job: of a pipeline, of the rank whose peak is the highest.

    ``pipeline_rank`` asks for another one of a pipeline. ``replay`` writes the first steps out request by request and replays them
    as CUDA's allocator does them, which takes some hundredths of a second: what is reserved is a figure then. Raises
    :class:`~zeroplan.errors.SpecError` for a combination that no engine offers (an optimizer without the asked implementation,
    say), and where ``replay`` asks for requests that are not known.

    >>> from zeroplan import BatchSpec, MeshSpec, ModelSpec, RecipeSpec
    >>> tiny = ModelSpec(family="llama", hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    ...                  num_key_value_heads=4, head_dim=16, vocab_size=256)
    >>> job = JobSpec(model=tiny, mesh=MeshSpec(dp_shard=8), recipe=RecipeSpec(engine="paper", zero_stage=3))
    >>> sum(estimate(job).states_by_kind.values()) == 2 * estimate(job).parameters  # 16Ψ/8
    True
    """
    if not isinstance(job, JobSpec):
        raise TypeError(f"estimate() takes a job, not {job!r:.60}; write estimate(job(model=..., gpus=8))")
    account = account_of_job(job) if pipeline_rank is None else _of_each_rank(job, job.batch)[pipeline_rank]
    highest = peak(account.moments)
    workspaces = _workspaces(job)
    parameters = parameter_count(job.model)
    return Estimate(
        job=job,
        parameters=parameters,
        active_parameters=active_parameter_count(job.model),
        states=tuple(line for line in account.states if line.kind in MODEL_STATES),
        engine_moments=account.moments,
        workspaces=workspaces,
        peak=highest._replace(lines=(*highest.lines, *workspaces)),
        outside=outside(job.mesh, job.cluster.gpu),
        host=account.host,
        nvme=account.nvme,
        traffic=_traffic(job, account, trained_count(job.model) if has_frozen(job.model) else parameters),
        symbols=tuple(dict.fromkeys(account.symbols)),  # runs of one kind of block have the same ones
        approximate=approximation(job.model, compute_of(job.recipe)),
        notes=(
            *account.notes,
            *_partly_recomputed(job),
            *_linear_attention(job),
            *_of_the_tower(job),
            *_held_logits(job, highest),
        ),
        kept=account.kept,
        pipeline=account.pipeline,
        replay=_replay(job, account.pipeline[0].rank if account.pipeline else None) if replay else None,
        longest_bytes=_with_longest(job),
    )


def _with_longest(job: JobSpec) -> int:
    longest = job.batch.longest_seq_len
    return (
        0 if longest is None else int(needed(job, replace(job.batch, seq_len=longest, longest_seq_len=None)).comfortable_bytes)
    )


REPLAYED_MICRO_BATCHES = 4
"""One step more than after which nothing changes; tests/test_replay.py compares it with eight."""


def replayed_if_tight(answer: Estimate) -> Estimate:
    """The answer with a replay of its requests, if only a replay can say whether the job runs.

    That is so where the peak fits the GPU and what the allocator may reserve around it does not. Of a step's micro-batches the
    first few are replayed: from the third on, each makes the same requests as the one before it and finds the same free blocks.
    A replay takes tenths of a second. The answer stays as it is where the requests are not known, and where expert-parallel ranks
    get the tokens that are routed to them: a replay has as many for each.
    """
    if answer.replay is not None or answer.verdict != "tight" or answer.is_tight_by_length or answer.job.mesh.ep > 1:
        return answer
    from zeroplan.engines.requests import not_written  # noqa: PLC0415  keeps start-up fast

    if not_written(answer.job):
        return answer
    if answer.pipeline:
        return replace(answer, replay=_replay(answer.job, answer.pipeline[0].rank))
    batch = answer.job.batch
    few = replace(batch, grad_accum_steps=min(batch.grad_accum_steps, REPLAYED_MICRO_BATCHES))
    return replace(answer, replay=_replay(replace(answer.job, batch=few), None))


def _replay(job: JobSpec, pipeline_rank: int | None) -> "StepReplay":
    from zeroplan.replay import StepReplay  # noqa: PLC0415  keeps start-up fast

    return StepReplay(job, pipeline_rank=pipeline_rank)


def verdict(least_bytes: int, comfortable_bytes: int, capacity_bytes: int | None) -> Verdict:
    """Whether what must fit fits, and whether what would be comfortable does. [bytes]"""
    if capacity_bytes is None:
        return "unknown"
    if least_bytes > capacity_bytes:
        return "does not fit"
    return "tight" if comfortable_bytes > capacity_bytes else "fits"


class Needed(NamedTuple):
    """What a card must give: see :attr:`Estimate.least_bytes` and :attr:`Estimate.comfortable_bytes`. [bytes]"""

    least_bytes: Int
    comfortable_bytes: Int


def needed(job: JobSpec, batch: Batch) -> Needed:
    """What the job needs with another batch, whose numbers may be columns: one account for all of them. [bytes]

    >>> from zeroplan.resolve import job
    >>> one = job(model="gpt2", gpus=8, stage=3, seq_len=128)
    >>> needed(one, one.batch).least_bytes == estimate(one).least_bytes
    True
    """
    least: Int = 0
    comfortable: Int = 0
    for account in _of_each_rank(job, batch):
        of_rank = needed_by(account, job)
        least, comfortable = maximum(least, of_rank.least_bytes), maximum(comfortable, of_rank.comfortable_bytes)
    return Needed(least, comfortable)


def needed_by(account: Account, job: JobSpec) -> Needed:
    """What a GPU with this account of the job needs. [bytes]"""
    workspaces = _workspaces(job)
    beside = total_band(outside(job.mesh, job.cluster.gpu)).expected_bytes
    moments = tuple(moment._replace(lines=(*moment.lines, *workspaces)) for moment in account.moments)
    highest: Int = 0
    for moment in moments:
        highest = maximum(highest, moment.total_bytes)
    comfortable = _with_missed(_reserved(sizes_of(moments, job.recipe), job).expected_bytes, highest, job)
    return Needed(highest + beside, comfortable + beside)


def _with_missed(reserved_bytes: Int, peak_bytes: Int, job: JobSpec) -> Int:
    """What is expected to be reserved, or what the estimate may miss if that is more. [bytes]"""
    missed = missed_by(job.model, job.recipe)
    return maximum(reserved_bytes, peak_bytes * (1000 + missed) // 1000) if missed else reserved_bytes


def _of_each_rank(job: JobSpec, batch: Batch) -> tuple[Account, ...]:
    """One account where ranks are alike, else that of every pipeline rank."""
    if job.mesh.pp == 1:
        return (account_of(job, batch),)
    job = replace(job, model=counted_model(job.model, job.recipe))
    return _pipeline(job.recipe.engine).accounts(job.model, job.recipe, job.mesh, batch)


class _Pipeline(EngineModule, Protocol):
    """What :mod:`zeroplan.engines.pipeline` and an engine with its own pipeline offer beside the account of the worst rank."""

    def accounts(self, model: ModelSpec, recipe: RecipeSpec, mesh: Mesh, batch: Batch) -> tuple[Account, ...]:
        """Memory and traffic of every rank."""
        ...


def _pipeline(engine: Engine) -> _Pipeline:
    return cast("_Pipeline", import_module(f"zeroplan.engines.{'pipeline' if engine == 'fsdp2' else engine}"))


def _reserved(sizes: Sizes, job: JobSpec, settings: AllocatorSettings = "default") -> Band:
    band = reserved(sizes, job.recipe, settings)
    return reserved_as_seen(band, job.recipe.engine, job.cluster.gpu) if settings == "default" else band


def _workspaces(job: JobSpec) -> tuple[Line, ...]:
    return workspace_lines(job.recipe, job.cluster.gpu, experts=job.model.has_experts)


_FLATTENED_IN_HOST_MEMORY = (
    "The GPU has no room for the model and its flat copy beside each other, so DeepSpeed makes that copy through host memory"
)


def counted_model(model: ModelSpec, recipe: RecipeSpec) -> ModelSpec:
    """The model as it is counted: of a vision tower the weights alone where its activations are not modelled."""
    if model.vision is None or not _tower_not_modelled(model.vision, recipe):
        return model
    return replace(model, vision=weights_alone(model.vision))


def _tower_not_modelled(vision: VisionSpec, recipe: RecipeSpec) -> str:
    """What the activations of a vision tower are not modelled with; empty where they are."""
    for is_so, what in (
        (recipe.engine in ON_PAPER, f"engine {recipe.engine!r}"),
        (recipe.recompute_layers is not None, "recomputation of some layers"),
        (recipe.offload_activations, "offload of activations"),
    ):
        if is_so and vision.has_blocks:
            return what
    return ""


def _of_the_tower(job: JobSpec) -> tuple[str, ...]:
    what = "" if job.model.vision is None else _tower_not_modelled(job.model.vision, job.recipe)
    if not what:
        return ()
    return (f"of the vision tower weights and states are counted, its activations are not: they are not modelled with {what}",)


def account_of_job(job: JobSpec) -> Account:
    """The engine's account, which the memory and the time of a job share within one question."""
    return recalled(lambda: ("account", job), lambda: account_of(job, job.batch))


def account_of(job: JobSpec, batch: Batch) -> Account:
    """The engine's account; with DeepSpeed's own way round, where its construction alone would not fit the GPU.

    Source: DeepSpeed 0.19.8, runtime/zero/stage_1_and_2.py, DeepSpeedZeroOptimizer.__init__ (``flatten_on_accelerator``).
    """
    job = replace(job, model=counted_model(job.model, job.recipe))
    if job.mesh.pp > 1:
        return _pipeline(job.recipe.engine).account(job.model, job.recipe, job.mesh, batch)
    engine = engine_module(job.recipe.engine)
    account = engine.account(job.model, job.recipe, job.mesh, batch)
    gpu = job.cluster.gpu
    if gpu is None or not flattens_on_the_gpu(job.recipe):
        return account
    room = int(gpu.memory_bytes.value) - int(total_band(outside(job.mesh, gpu)).expected_bytes)
    if all(int(moment.total_bytes) <= room for moment in account.moments if moment.phase is Phase.INIT):
        return account
    account = engine.account(job.model, flattened_through_the_host(job.recipe), job.mesh, batch)
    return account._replace(notes=(*account.notes, _FLATTENED_IN_HOST_MEMORY))


def flattens_on_the_gpu(recipe: RecipeSpec) -> bool:
    """Whether DeepSpeed makes its flat copy of the weights on the GPU, if there is room."""
    return recipe.engine == "deepspeed" and recipe.zero_stage in (1, 2) and recipe.deepspeed.flatten_on_accelerator


def flattened_through_the_host(recipe: RecipeSpec) -> RecipeSpec:
    """The recipe as DeepSpeed carries it out where there is none."""
    return replace(recipe, deepspeed=replace(recipe.deepspeed, flatten_on_accelerator=False))


def _held_logits(job: JobSpec, highest: Moment) -> tuple[str, ...]:
    """What a loop that holds the model's output adds to a peak in or after the loss, or has added. [bytes in words]

    accelerate 1.15 returns logits in fp32 (``Accelerator.prepare_model``, ``convert_outputs_to_fp32``; not with DeepSpeed), and
    the loops of its examples hold them. transformers 5.23's Trainer releases them, torchtitan since June 2024 (pull request 391).
    """
    recipe = job.recipe
    late = highest.phase in (Phase.LOSS, Phase.BACKWARD)
    lets_go = recipe.fsdp2.modules == "torchtitan"
    if recipe.engine in ON_PAPER or recipe.loss != "full" or job.mesh.pp > 1 or lets_go or not late:
        return ()
    upcast = recipe.precision.endswith("mixed") and recipe.engine != "deepspeed" and job.model.profile is None
    how = recipe.keep_logits or ("fp32" if upcast else True)
    batch = replace(job.batch, seq_len=job.batch.seq_len // job.mesh.cp) if job.mesh.cp > 1 else job.batch
    compute = compute_of(recipe, tp=job.mesh.tp, cp=job.mesh.cp)
    size = format_size(int(output_bytes(job.model, compute, batch, fp32_output=how == "fp32")))
    flag = "fp32" if how == "fp32" else "yes"
    said = (
        f"the estimate assumes that your loop keeps the logits in the backward ({size}); if it drops them, set --keep-logits no"
        if recipe.keep_logits
        else f"if your loop keeps the logits in the backward, as accelerate's do, it needs {size} more: set --keep-logits {flag}"
    )
    return (said,)


def _partly_recomputed(job: JobSpec) -> tuple[str, ...]:
    first = first_recomputed(job.model, job.recipe)
    if first is None:
        return ()
    of = job.model.num_hidden_layers
    return (
        f"blocks 1 to {first} of {of} are recomputed; those after them, which keep all that autograd saves, are called plain",
    )


def _linear_attention(job: JobSpec) -> tuple[str, ...]:
    if job.model.linear is None:
        return ()
    kernels = "mamba_ssm and causal-conv1d" if job.model.layer_pattern else "flash-linear-attention and causal-conv1d"
    what = "Mamba-2" if job.model.layer_pattern else "linear attention"
    return (f"{what} is counted as transformers' own PyTorch code runs it; with {kernels} installed it keeps less",)


def _traffic(job: JobSpec, account: Account, parameters: int) -> Traffic:
    width = widths(job.recipe.precision)
    options = job.recipe.fsdp1 if job.recipe.engine == "fsdp1" else job.recipe.fsdp2
    narrow = job.recipe.engine in ("paper", "deepspeed") or options.reduce_dtype == "param"
    once = job.mesh.pp > 1 or job.recipe.engine == "megatron" or not job.recipe.sync_every_micro_batch
    return traffic(
        account.collectives,
        parameters=account.pipeline[0].parameters if account.pipeline else ceil_div(parameters, job.mesh.tp * job.mesh.pp),
        ranks=job.mesh.dp_shard * job.mesh.dp_replicate * (job.mesh.cp if job.recipe.engine == "fsdp2" else 1),
        reductions=1 if once else job.batch.grad_accum_steps,
        gradient_bytes=width.compute if narrow else width.stored,
    )
