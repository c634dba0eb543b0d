"""How much memory does one GPU need for this job, when in the step, why, and does it fit? Start at :func:`estimate`."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import import_module
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, cast

from zeroplan.engines.account import Account, PipelineRank, Symbol
from zeroplan.engines.device import Outside, outside, reserved_as_seen, total_band, workspace_lines
from zeroplan.engines.optimizers import implementation_of
from zeroplan.engines.precisions import compute_of, widths
from zeroplan.engines.reserved_shares import with_missed
from zeroplan.engines.userbuffers import overlap_buffers
from zeroplan.errors import SpecError
from zeroplan.ledger import Band, Kind, Line, Moment, Phase, Role, bytes_by_kind, total_bytes
from zeroplan.memo import recalled
from zeroplan.numeric import Int, ceil_div, maximum
from zeroplan.spec.batch import Batch
from zeroplan.spec.hardware import SETTINGS, AllocatorSettings, node_size
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
    """The interface of the engine modules in ``zeroplan.engines``."""

    def account(self, model: ModelSpec, recipe: RecipeSpec, mesh: Mesh, batch: Batch) -> Account:
        """Return the memory and traffic of one rank."""
        ...


def engine_module(engine: Engine) -> EngineModule:
    """Import and return one engine's module; importing only that one keeps start-up fast."""
    return cast("EngineModule", import_module(f"zeroplan.engines.{engine}"))


def step_implementation(recipe: RecipeSpec) -> OptimizerImpl | None:
    """The implementation of the optimizer's step: the requested one, or the engine's default; None for closed-form engines.

    >>> step_implementation(RecipeSpec()), step_implementation(RecipeSpec(engine="paper"))
    ('foreach', None)
    """
    return None if recipe.engine in ON_PAPER else implementation_of(recipe)


#: The model states of the ZeRO paper (arXiv:1910.02054, section 3.1), in its order. Engines may hold other buffers as well.
MODEL_STATES = (Kind.PARAMETERS, Kind.GRADIENTS, Kind.OPTIMIZER_STATE)

Verdict = Literal["fits", "tight", "does not fit", "unknown"]


@dataclass(frozen=True, kw_only=True)  # cached_property needs a __dict__, so no slots
class Estimate:
    """The memory account of one GPU (rank 0) in the steady state of a training step. All sizes in bytes."""

    job: JobSpec
    """The complete job."""
    parameters: int
    """The number of parameters; tied ones count once."""
    active_parameters: int
    """The number of parameters that one token uses."""
    states: tuple[Line, ...]
    """Parameters, gradients and optimizer state as the engine keeps them."""
    engine_moments: Sequence[Moment]
    """Every named moment of the step with the engine's own lines."""
    workspaces: tuple[Line, ...]
    """Workspaces of libraries (cuBLAS), alive at every moment."""
    peak: Moment
    """The largest moment, workspaces included; its total is what ``torch.cuda.max_memory_allocated`` would return."""
    outside: tuple[Outside, ...]
    """GPU memory outside the allocator: CUDA's context, communicators, and buffers of kernels that send tokens to experts."""
    host: tuple[Line, ...]
    """Host memory per rank; empty without offload."""
    nvme: tuple[Line, ...]
    """Files on NVMe per rank; empty without offload to NVMe."""
    traffic: Traffic
    """The bytes that one GPU sends in a step, by collective."""
    symbols: tuple[Symbol, ...]
    """The engine's own symbols, which its formulas use beside the model's legend."""
    approximate: str
    """A sentence on the part that is not exact for this architecture; empty if all is exact."""
    notes: tuple[str, ...]
    """Sentences about surprising parts of the answer."""
    kept: tuple[tuple[str, tuple[Line, ...]], ...]
    """For each kind of block whose saved tensors the moments sum in one line: the kind and the single lines of one block."""
    pipeline: tuple[PipelineRank, ...] = ()
    """All ranks of a pipeline; the first is the rank of this estimate."""
    replay: "StepReplay | None" = None
    """A replay of the first steps' requests, if it was asked for; it then gives the reserved memory."""
    longest_bytes: int = 0
    """``comfortable_bytes`` for the longest possible sequences, if lengths were drawn from a distribution; else 0."""

    def __repr__(self) -> str:
        """Return one line with the peak and the verdict; a dataclass's own repr would fill a hundred screens."""
        job, ranks = self.job, self.job.mesh.world_size
        name = job.model.name or job.model.family
        described = f"{name!r}, {job.recipe.engine}, ZeRO stage {job.recipe.zero_stage}, ranks={ranks}"
        return f"<Estimate of {described}: peak {format_size(self.peak_bytes)} at {self.peak.name!r}, {self.verdict}>"

    @property
    def legend(self) -> dict[str, int]:
        """The value of every symbol in the lines' formulas."""
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
        if self.job.recipe.engine == "megatron" and self.job.model.adapter is not None:
            from zeroplan.engines.megatron.parameters import trained_count as of_megatron  # noqa: PLC0415  few jobs have it

            return of_megatron(self.job)
        return trained_count(self.job.model)

    @property
    def peak_bytes(self) -> int:
        """The peak of allocated memory, as ``torch.cuda.max_memory_allocated`` returns it."""
        return int(self.peak.total_bytes)

    @cached_property
    def moments(self) -> tuple[Moment, ...]:
        """Every named moment with all its lines, library workspaces included."""
        return tuple(moment._replace(lines=(*moment.lines, *self.workspaces)) for moment in self.engine_moments)

    @cached_property
    def _sizes(self) -> Sizes:
        """The moments' highest totals, by stream and kind, from which reserved memory is computed."""
        return sizes_of(self.moments, self.job.recipe)

    @cached_property
    def reserved(self) -> Band:
        """The memory that the caching allocator reserves with its default settings, on a GPU with enough memory."""
        return self.reserved_with("default")

    def reserved_with(self, settings: AllocatorSettings) -> Band:
        """The memory that the caching allocator reserves with these settings. [bytes]

        It comes from recorded jobs of the engine. A replay of the step's requests (:mod:`zeroplan.replay`), if there is one, gives
        it for this job alone. The highest value stays for jobs whose replay was never compared with a record.
        """
        of_records = None if self.replay is not None and self.replay.is_covered else _reserved(self._sizes, self.job, settings)
        if self.replay is None:
            return cast("Band", of_records)
        least, expected, most = self.replay.band(settings)
        return Band(least, expected, most if of_records is None else maximum(most, of_records.high_bytes))

    def under_pressure(self, settings: AllocatorSettings = "default") -> Band:
        """The smallest room in which the job runs if the allocator frees its cache whenever the GPU is full. [bytes]

        The lowest value is the peak. The others include cached memory that cannot be freed: its segment has a block in use.
        """
        return under_pressure(self._sizes, self.job.recipe, settings)

    @property
    def allocator_room_bytes(self) -> int | None:
        """The GPU's memory minus context and communicators; None if the job names no GPU."""
        gpu = self.job.cluster.gpu
        return None if gpu is None else int(gpu.memory_bytes.value) - int(self.outside_band.expected_bytes)

    @property
    def held(self) -> tuple[Line, ...]:
        """The lines that are alive at a step's end and at every moment until the next optimizer's step.

        The optimizer's step does not count: during it DeepSpeed's stage 3 releases small parameters and gathers them again.
        """
        last = [moment.lines for moment in self.engine_moments if moment.phase is Phase.STEP][-1]
        apart = (Phase.INIT, Phase.FIRST, Phase.STEP)
        until = [moment.lines for moment in self.engine_moments if moment.phase not in apart]
        left = tuple(line for line in last if line.tag.role is Role.UNTIL_NEXT_STEP)
        return (*(line for line in until[0] if line in last and all(line in lines for lines in until)), *left)

    @property
    def outside_band(self) -> Band:
        """The sum of context and communicators."""
        return total_band(self.outside)

    @property
    def host_bytes(self) -> int:
        """Host memory per rank; 0 without offload."""
        return int(total_bytes(self.host))

    @property
    def ranks_per_node(self) -> int | None:
        """GPUs of this job that share a node; None if unknown."""
        known = node_size(self.job.cluster)
        return None if known is None else min(known, self.job.mesh.world_size)

    @property
    def host_bytes_per_node(self) -> int | None:
        """Host memory of a node; None if the number of ranks per node is unknown."""
        return None if self.ranks_per_node is None else self.host_bytes * self.ranks_per_node

    @property
    def nvme_bytes(self) -> int:
        """Files on NVMe per rank; 0 without offload to NVMe."""
        return int(total_bytes(self.nvme))

    @property
    def nvme_bytes_per_node(self) -> int | None:
        """Files on NVMe of a node; None if the number of ranks per node is unknown."""
        return None if self.ranks_per_node is None else self.nvme_bytes * self.ranks_per_node

    @property
    def bytes_on_slowest_link(self) -> int:
        """The bytes that one GPU sends per step, without groups whose ranks may share a node (tensor parallelism, ZeRO++)."""
        ranks, calls = self.job.mesh.world_size, self.traffic.collectives
        return int(self.traffic.total_bytes) - sum(int(call.sent_bytes) for call in calls if call.near and call.group != ranks)

    @property
    def capacity_bytes(self) -> int | None:
        """The GPU's memory as torch reports it; None if the job names no GPU."""
        gpu = self.job.cluster.gpu
        return None if gpu is None else int(gpu.memory_bytes.value)

    @property
    def least_bytes(self) -> int:
        """The minimum that must fit: the allocated peak plus the expected context and communicators.

        Cached blocks do not count: before it runs out of memory, the allocator frees as many as it can (:meth:`under_pressure`).
        """
        return self.peak_bytes + int(self.outside_band.expected_bytes)

    @property
    def comfortable_bytes(self) -> int:
        """The memory with which the allocator never has to free its cache: expected reserved memory plus memory outside it.

        If sequence lengths were drawn, it is that of the longest possible sequences. If runs of such jobs exceeded their estimates,
        it is at least the estimate plus the largest excess.
        """
        return max(self._own_comfortable_bytes, self.longest_bytes)

    @property
    def _own_comfortable_bytes(self) -> int:
        expected = self.reserved.expected_bytes if self.replay is None else self.replay.replayed().reserved_bytes
        reserved = int(with_missed(expected, self.peak_bytes, self.job.model, self.job.recipe))
        return reserved + int(self.outside_band.expected_bytes)

    @property
    def is_tight_by_length(self) -> bool:
        """Whether the job is ``tight`` only because real sequences may be longer than the drawn ones."""
        capacity = self.capacity_bytes
        return capacity is not None and self._own_comfortable_bytes <= capacity < self.longest_bytes

    @property
    def verdict(self) -> Verdict:
        """Whether the job fits the GPU; ``tight``: it fits only if the allocator's cache stays small.

        If a replay runs out of memory with both settings of the allocator, the job does not fit, whatever its peak.
        """
        capacity, room = self.capacity_bytes, self.allocator_room_bytes
        if capacity is None or room is None:
            return "unknown"
        if self.least_bytes > capacity or not any(self.fits_in_replay(settings) for settings in SETTINGS):
            return "does not fit"
        if self.replay is not None and self.replay.on_card(room).retries:  # it reserves more than the room
            return "tight"
        return verdict(self.least_bytes, self.comfortable_bytes, capacity)

    def fits_in_replay(self, settings: AllocatorSettings) -> bool:
        """Whether the replayed step has enough memory on the GPU; True without a replay or a GPU."""
        room = self.allocator_room_bytes
        return self.replay is None or room is None or self.replay.fits(room, settings)

    @property
    def needs_expandable_segments(self) -> bool:
        """Whether the replayed step runs out of memory with the default settings and runs with expandable segments."""
        return not self.fits_in_replay("default") and self.fits_in_replay("expandable_segments")

    @property
    def fits(self) -> bool | None:
        """True for ``fits`` and ``tight``; None if the job names no GPU."""
        return None if self.capacity_bytes is None else self.verdict != "does not fit"

    @property
    def room_bytes(self) -> int | None:
        """The GPU's memory minus ``least_bytes``; negative if the job does not fit."""
        capacity = self.capacity_bytes
        return None if capacity is None else capacity - self.least_bytes


def estimate(job: JobSpec, *, pipeline_rank: int | None = None, replay: bool = False) -> Estimate:
    """Return the memory and traffic of one GPU of this job; in a pipeline, of the rank with the highest peak.

    ``pipeline_rank`` selects another rank of a pipeline. ``replay`` replays the first steps' requests through a model of CUDA's
    allocator, in some hundredths of a second, so that reserved memory is one figure instead of a range. Raises
    :class:`~zeroplan.errors.SpecError` for a combination that the engine does not support (for example an optimizer without the
    requested implementation), and for ``replay`` if zeroplan does not know the job's requests.

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
    highest, workspaces, parameters = peak(account.moments), _workspaces(job), parameter_count(job.model)
    return Estimate(
        job=job,
        parameters=parameters,
        active_parameters=active_parameter_count(job.model),
        states=tuple(line for line in account.states if line.kind in MODEL_STATES),
        engine_moments=account.moments,
        workspaces=workspaces,
        peak=highest._replace(lines=(*highest.lines, *workspaces)),
        outside=_outside(job),
        host=account.host,
        nvme=account.nvme,
        traffic=_traffic(job, account, trained_count(job.model) if has_frozen(job.model) else parameters),
        symbols=tuple(dict.fromkeys(account.symbols)),  # runs of blocks of the same kind repeat their symbols
        approximate=approximation(job.model, compute_of(job.recipe)),
        notes=(*account.notes, *_notes(job, highest)),
        kept=account.kept,
        pipeline=account.pipeline,
        replay=_replay(job, account.pipeline[0].rank if account.pipeline else None) if replay else None,
        longest_bytes=_with_longest(job),
    )


def _notes(job: JobSpec, highest: Moment) -> tuple[str, ...]:
    """Return the notes that do not come from the engine's account."""
    return (*_partly_recomputed(job), *_linear_attention(job), *_of_the_tower(job), *_held_logits(job, highest))


def _with_longest(job: JobSpec) -> int:
    longest = job.batch.longest_seq_len
    return (
        0 if longest is None else int(needed(job, replace(job.batch, seq_len=longest, longest_seq_len=None)).comfortable_bytes)
    )


REPLAYED_MICRO_BATCHES = 4
"""Enough micro-batches to reach the steady state; tests/test_replay.py compares with eight."""


def replayed_if_tight(answer: Estimate) -> Estimate:
    """Return the answer with a replay of its requests, if only a replay can tell whether the job runs.

    That is the case if the peak fits the GPU and the memory that the allocator may reserve does not. The replay has only the first
    few micro-batches of a step: from the third on, each makes the same requests and finds the same free blocks. It takes tenths of
    a second. The answer is returned unchanged if zeroplan does not know the requests, and with expert parallelism: a replay gives
    every rank the same number of tokens.
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


def judged(job: JobSpec) -> Estimate:
    """Return the estimate whose verdict every command gives: with a replay if only that can tell whether the job runs."""
    return replayed_if_tight(estimate(job))


def _replay(job: JobSpec, pipeline_rank: int | None) -> "StepReplay":
    from zeroplan.replay import StepReplay  # noqa: PLC0415  keeps start-up fast

    return StepReplay(job, pipeline_rank=pipeline_rank)


def verdict(least_bytes: int, comfortable_bytes: int, capacity_bytes: int | None) -> Verdict:
    """Compare the minimum and the comfortable memory with the GPU's capacity. [bytes]"""
    if capacity_bytes is None:
        return "unknown"
    if least_bytes > capacity_bytes:
        return "does not fit"
    return "tight" if comfortable_bytes > capacity_bytes else "fits"


class Needed(NamedTuple):
    """The memory that a job needs; see :attr:`Estimate.least_bytes` and :attr:`Estimate.comfortable_bytes`. [bytes]"""

    least_bytes: Int
    comfortable_bytes: Int


def needed(job: JobSpec, batch: Batch) -> Needed:
    """The memory that the job needs with another batch, whose numbers may be columns (one row per layout). [bytes]

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


def _outside(job: JobSpec) -> tuple[Outside, ...]:
    return (*outside(job.mesh, job.cluster.gpu), *_of_experts(job), *overlap_buffers(job))


def _of_experts(job: JobSpec) -> tuple[Outside, ...]:
    if job.model.moe is None:
        return ()
    from zeroplan.engines.deep_ep import expert_buffers  # noqa: PLC0415  only experts pay for it

    return expert_buffers(job)


def needed_by(account: Account, job: JobSpec) -> Needed:
    """The memory that a GPU with this account of the job needs. [bytes]"""
    workspaces = _workspaces(job)
    beside = total_band(_outside(job)).expected_bytes
    moments = tuple(moment._replace(lines=(*moment.lines, *workspaces)) for moment in account.moments)
    highest: Int = 0
    for moment in moments:
        highest = maximum(highest, moment.total_bytes)
    comfortable = with_missed(_reserved(sizes_of(moments, job.recipe), job).expected_bytes, highest, job.model, job.recipe)
    return Needed(highest + beside, comfortable + beside)


def _of_each_rank(job: JobSpec, batch: Batch) -> tuple[Account, ...]:
    """One account without a pipeline, else the account of every pipeline rank."""
    if job.mesh.pp == 1:
        return (account_of(job, batch),)
    job = replace(job, model=counted_model(job.model, job.recipe))
    return _pipeline(job.recipe.engine).accounts(job.model, job.recipe, job.mesh, batch)


class _Pipeline(EngineModule, Protocol):
    """The further interface of :mod:`zeroplan.engines.pipeline`, and of an engine with its own pipeline."""

    def accounts(self, model: ModelSpec, recipe: RecipeSpec, mesh: Mesh, batch: Batch) -> tuple[Account, ...]:
        """Return the memory and traffic of every pipeline rank."""
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
    """The model to be counted: the vision tower's weights only, if its activations are not modelled with this recipe."""
    if model.vision is None or not _tower_not_modelled(model.vision, recipe):
        return model
    return replace(model, vision=weights_alone(model.vision))


def _tower_not_modelled(vision: VisionSpec, recipe: RecipeSpec) -> str:
    """The setting with which a vision tower's activations are not modelled; empty if they are."""
    for is_so, what in (
        (recipe.engine == "paper", "engine 'paper'"),
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
    """The engine's account of the job, cached within one question: both memory and step time need it."""
    return recalled(lambda: ("account", job), lambda: account_of(job, job.batch))


def account_of(job: JobSpec, batch: Batch) -> Account:
    """The engine's account. If DeepSpeed's flat copy of the weights does not fit the GPU, DeepSpeed makes it in host memory.

    Source: DeepSpeed 0.19.8, runtime/zero/stage_1_and_2.py, DeepSpeedZeroOptimizer.__init__ (``flatten_on_accelerator``).
    """
    job = replace(job, model=counted_model(job.model, job.recipe))
    _demand_adapters(job.model)
    if job.mesh.pp > 1:
        return _pipeline(job.recipe.engine).account(job.model, job.recipe, job.mesh, batch)
    engine = engine_module(job.recipe.engine)
    account = engine.account(job.model, job.recipe, job.mesh, batch)
    gpu = job.cluster.gpu
    if gpu is None or not flattens_on_the_gpu(job.recipe):
        return account
    room = int(gpu.memory_bytes.value) - int(total_band(_outside(job)).expected_bytes)
    if all(int(moment.total_bytes) <= room for moment in account.moments if moment.phase is Phase.INIT):
        return account
    account = engine.account(job.model, flattened_through_the_host(job.recipe), job.mesh, batch)
    return account._replace(notes=(*account.notes, _FLATTENED_IN_HOST_MEMORY))


def _demand_adapters(model: ModelSpec) -> None:
    """Raise SpecError for adapters of layers that the model does not have, as attention of a few layers that are all linear."""
    if model.adapter is not None and not trained_count(model):
        raise SpecError(
            f"LoRA with targets {model.adapter.targets!r} adapts none of this model's {model.num_hidden_layers} layers; name others"
        )


def flattens_on_the_gpu(recipe: RecipeSpec) -> bool:
    """Whether DeepSpeed makes its flat copy of the weights on the GPU, if there is room."""
    return recipe.engine == "deepspeed" and recipe.zero_stage in (1, 2) and recipe.deepspeed.flatten_on_accelerator


def flattened_through_the_host(recipe: RecipeSpec) -> RecipeSpec:
    """The recipe that DeepSpeed follows if the GPU has no room for the flat copy."""
    return replace(recipe, deepspeed=replace(recipe.deepspeed, flatten_on_accelerator=False))


def _held_logits(job: JobSpec, highest: Moment) -> tuple[str, ...]:
    """A note on the memory of a training loop that holds the model's output during the backward.

    accelerate 1.15 returns logits in fp32 (``Accelerator.prepare_model``, ``convert_outputs_to_fp32``; not with DeepSpeed), and
    the loops of its examples hold them. transformers 5.23's Trainer releases them, torchtitan since June 2024 (pull request 391).
    """
    recipe = job.recipe
    late = highest.phase in (Phase.LOSS, Phase.BACKWARD) or (highest.phase is Phase.FIRST and not highest.of_forward)
    lets_go = recipe.fsdp2.are_torchtitans
    if recipe.engine in ON_PAPER or recipe.loss != "full" or job.mesh.pp > 1 or lets_go or not late:
        return ()
    upcast = recipe.precision.endswith("mixed") and recipe.engine != "deepspeed" and job.model.profile is None
    how = recipe.keep_logits or ("fp32" if upcast else True)
    batch = replace(job.batch, seq_len=job.batch.seq_len // job.mesh.cp) if job.mesh.cp > 1 else job.batch
    compute = compute_of(recipe, tp=job.mesh.tp, cp=job.mesh.cp)
    size = format_size(int(output_bytes(job.model, compute, batch, fp32_output=how == "fp32")))
    flag = "fp32" if how == "fp32" else "yes"
    note = (
        f"the estimate assumes that your loop keeps the logits in the backward ({size}); if it drops them, set --keep-logits no"
        if recipe.keep_logits
        else f"if your loop keeps the logits in the backward, as accelerate's do, it needs {size} more: set --keep-logits {flag}"
    )
    return (note,)


def _partly_recomputed(job: JobSpec) -> tuple[str, ...]:
    first = first_recomputed(job.model, job.recipe)
    if first is None:
        return ()
    of = job.model.num_hidden_layers
    if job.recipe.recompute_layers is None:
        recipe = job.recipe.float8_recipe
        return (f"blocks 1 to {first} of {of} run in {recipe}; those after them are called plain; times count all so",)
    return (
        f"blocks 1 to {first} of {of} are recomputed; those after them, which keep all that autograd saves, are called plain",
    )


def _linear_attention(job: JobSpec) -> tuple[str, ...]:
    if job.model.linear is None:
        return ()
    if job.model.family == "minimax":
        return _lightning_attention(job)
    what, packages = "Mamba-2" if job.model.layer_pattern else "linear attention", job.model.traits.kernels
    if job.recipe.linear_attention == "kernels":
        return (f"{what} is counted as the code of {packages} allocates; no run on a GPU has confirmed it",)
    others = packages or "mamba_ssm and causal-conv1d"
    return (f"{what} is counted as transformers' own PyTorch code runs it; with {others} installed it keeps less",)


def _lightning_attention(job: JobSpec) -> tuple[str, ...]:
    counted = "lightning attention is counted as transformers' own PyTorch code runs it, a loop over chunks"
    if not job.recipe.engine.startswith("fsdp") or not widths(job.recipe.precision).mixed:
        return (counted,)
    name = widths(job.recipe.precision).name
    return (
        counted,
        f"load the model in {name} and cast only its parameters to fp32, as accelerate does: fp32 decays stop its class",
    )


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
