"""Which small changes would make a job fit its GPU? And how long may its sequences be?

Each candidate is one change that a person would try, the cheapest first, with a full estimate. If no single change is enough,
changes are combined in that order until the job fits. Then each change is removed or weakened if the job still fits.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple, TypeAlias

from zeroplan.errors import SpecError
from zeroplan.estimator import Estimate, estimate, judged, step_implementation
from zeroplan.memo import remembering
from zeroplan.spec.adapter import AdapterSpec, Quantize
from zeroplan.spec.job import JobSpec, engine_at
from zeroplan.spec.recipe import ADAM, DdpOptions, RecipeSpec, Stage, kernels_under
from zeroplan.units import TIB

MOST_GPUS = 4096
_SHORTEST = 512


class Remedy(NamedTuple):
    """A change (or several together) after which the job fits."""

    change: str
    """In words: ``recompute every block``."""
    flags: str
    """As flags: ``--recompute full``."""
    needed_bytes: int
    """The allocated peak plus memory outside the allocator, after the change."""
    room_bytes: int
    is_tight: bool = False
    """Whether the job then fits only if the allocator's cache stays small."""

    slower: float | None = None
    """The share of tokens/s per GPU that the change costs, negative if it gains some; None without a GPU or a known time."""
    needs_expandable_segments: bool = False
    """Whether a replay of the job then runs out of memory with the allocator's default settings."""

    @property
    def how(self) -> str:
        """Whether it fits tightly, and its price in speed: ``, tightly, 6 % slower``. Messages append it to the needed bytes."""
        tightly, slower = ", tightly" * self.is_tight, self.slower
        if self.needs_expandable_segments:
            tightly = ", only with expandable segments"
        if slower is None:
            return tightly
        if abs(slower) < _AS_FAST:
            return f"{tightly}, as fast"
        each = " per GPU" if "--gpus " in self.flags else ""
        return f"{tightly}, {100 * abs(slower):.0f} % {'slower' if slower > 0 else 'faster'}{each}"


_AS_FAST = 0.005
"""Modelled speeds that differ by less are called equal."""


class _Needs(NamedTuple):
    """The memory that a job needs and leaves on its GPU. ``fits`` includes host memory per server. [bytes]"""

    fits: bool
    least_bytes: int
    room_bytes: int
    is_tight: bool
    needs_expandable_segments: bool = False


MOST_HOST_BYTES = 2 * TIB
"""The most host memory per server that an offload suggestion may need: an NVIDIA DGX H100's (datasheet, 2023). [bytes]"""


class _Candidate(NamedTuple):
    """One change: in words, as flags, and as a function from a job to the changed job."""

    change: str
    flags: str
    applied_to: Callable[[JobSpec], JobSpec]


_Kind: TypeAlias = Callable[[JobSpec], Iterator[_Candidate]]


@remembering()
def remedies(short: Estimate, *, most: int = 5) -> tuple[Remedy, ...]:
    """Return up to ``most`` changes that make the job fit, the mildest of each kind; empty if it fits or names no GPU.

    If no single change is enough that keeps the GPUs and the training, combinations come first: one on the same number of GPUs,
    and one that may add GPUs. Changes of the model and of the type of GPU are left out.
    """
    if short.fits is not False:
        return ()
    job = short.job
    alone = {kind: remedy for kind in _KINDS if (remedy := _mildest(job, kind))}
    if alone.keys() - _COSTLY:
        return tuple(alone.values())[:most]
    together = (_combined(job, kinds) for kinds in (_COMBINED_ON_THESE_GPUS, _COMBINED_WITH_MORE_GPUS))
    found = {one.flags: one for one in (*together, *alone.values()) if one is not None}
    return tuple(found.values())[:most]


def in_keys(found: Sequence[Remedy], keys: Mapping[str, str]) -> tuple[Remedy, ...]:
    """Return the remedies with the key of the user's file before each flag that the file sets, since a flag would contradict it.

    ``keys``: :attr:`zeroplan.resolve.Resolved.keys`.

    >>> one = Remedy("fewer sequences", "--micro-batch 1 --recompute full", 0, 0)
    >>> in_keys([one], {"micro_batch": "per_device_train_batch_size"})[0].flags
    'per_device_train_batch_size in the file, as --micro-batch 1; --recompute full'
    """
    return tuple(one._replace(flags=_in_keys(one.flags, keys)) for one in found) if keys else tuple(found)


def _in_keys(flags: str, keys: Mapping[str, str]) -> str:
    flags_of_it = [f"--{one}" for one in flags.removeprefix("--").split(" --")]
    named = [keys.get(one.removeprefix("--").partition(" ")[0].replace("-", "_")) for one in flags_of_it]
    if not any(named):
        return flags
    in_file = [f"{key} in the file, as {one}" for key, one in zip(named, flags_of_it, strict=True) if key]
    beside = " ".join(one for key, one in zip(named, flags_of_it, strict=True) if not key)
    return "; ".join([*in_file, *([beside] if beside else [])])


class Change(NamedTuple):
    """One change of a job, in words and as flags, and the changed job, which need not fit."""

    change: str
    flags: str
    job: JobSpec
    kind: str
    """The kind of change, such as ``recompute`` or ``more_gpus``."""


class Longest(NamedTuple):
    """The longest sequences with which a job fits its GPU, in multiples of 128; 0 where none does. [tokens]"""

    fits: int
    """With room for what the allocator caches."""
    tightly: int
    most: int
    """The longest that was tried: the positions of the model."""


_SEQUENCE_STEP = 128


def longest_sentence(found: Longest) -> str:
    """Return what was found as a sentence.

    >>> longest_sentence(Longest(fits=31_232, tightly=37_504, most=131_072))
    'Sequences of up to 31,232 tokens fit; of up to 37,504 tightly.'
    """
    if not found.tightly:
        return "No length of the sequences fits."
    if found.fits == found.most:
        return f"Sequences of all {found.most:,} tokens that the model can read fit."
    if not found.fits:
        return f"Sequences of up to {found.tightly:,} tokens fit, tightly."
    return f"Sequences of up to {found.fits:,} tokens fit" + (
        f"; of up to {found.tightly:,} tightly." if found.tightly > found.fits else "."
    )


def longest_sequences(job: JobSpec) -> Longest:
    """Return how long the sequences of this job may be on its GPU; everything else stays as it is.

    It bisects, since longer sequences need more memory. Raises SpecError for a job without a GPU.
    """
    if job.cluster.gpu is None:
        raise SpecError("the longest sequence needs a GPU to fit; add --gpu NAME (`zeroplan gpus` lists them)")
    most = max(job.model.max_position_embeddings, 1)
    lengths = [*range(_SEQUENCE_STEP, most, _SEQUENCE_STEP), most]

    def needs(length: int) -> _Needs | None:
        return _needs_after(job, [_with_batch("", "", seq_len=length)])

    tightly = bisect_left(lengths, True, key=lambda length: (of := needs(length)) is None or not of.fits)
    within = lengths[:tightly]
    fits = bisect_left(within, True, key=lambda length: (of := needs(length)) is None or of.is_tight)
    return Longest(within[fits - 1] if fits else 0, within[-1] if within else 0, most)


def single_changes(job: JobSpec) -> Iterator[Change]:
    """Yield every single change that a person would try, the mildest of each kind first."""
    for one in _free_changes(job.recipe):
        yield Change(one.change, one.flags, one.applied_to(job), one.flags)
    for kind in _KINDS:
        for one in kind(job) if kind is not _lighter_step else ():
            try:
                yield Change(one.change, one.flags, one.applied_to(job), kind.__name__.strip("_"))
            except SpecError:  # the engine does not support it
                continue


def _mildest(job: JobSpec, kind: _Kind) -> Remedy | None:
    """The mildest change of a kind that makes the job fit; None if the strongest does not even by the count of its moments.

    For experts under FSDP2 the strongest says nothing: FSDP2 pads their dim 0 to its ranks, so more GPUs may need more memory.
    """
    options = tuple(kind(job))
    fills_up = job.recipe.engine == "fsdp2" and job.model.moe is not None
    needs = _needs_after(job, options[-1:], replayed=False) if options and not fills_up else None
    if needs is not None and not needs.fits:
        return None
    return next((remedy for one in options if (remedy := _tried(job, [one])) is not None), None)


def _needs_after(job: JobSpec, changes: Sequence[_Candidate], *, replayed: bool = True) -> _Needs | None:
    """Return the job's needs after the changes; None if the changed job is invalid or the engine does not support it."""
    try:
        return _needs_of(_all_applied(job, changes), replayed=replayed)
    except SpecError:
        return None


def _fits_after(job: JobSpec, changes: Sequence[_Candidate], *, replayed: bool) -> bool:
    needs = _needs_after(job, changes, replayed=replayed)
    return needs is not None and needs.fits


def _tried(job: JobSpec, changes: Sequence[_Candidate]) -> Remedy | None:
    """The changes as a remedy; None if the job does not fit after them."""
    needs = _needs_after(job, changes)
    if needs is None or not needs.fits:
        return None
    return Remedy(
        "; ".join(one.change for one in changes),
        _flags_of(changes),
        needs.least_bytes,
        needs.room_bytes,
        is_tight=needs.is_tight,
        slower=_slower(job, _all_applied(job, changes)),
        needs_expandable_segments=needs.needs_expandable_segments,
    )


def _slower(before: JobSpec, after: JobSpec) -> float | None:
    """The relative loss of tokens/s per GPU; None if a step's time is unknown."""
    from zeroplan.job_time import time_of  # noqa: PLC0415  a job that fits needs no times

    try:
        return 1 - float(time_of(after).tokens_per_s / time_of(before).tokens_per_s)
    except SpecError:
        return None


def _flags_of(changes: Sequence[_Candidate]) -> str:
    """The flags of several changes; for a flag that two changes set, the later value."""
    words = " ".join(one.flags for one in changes).removeprefix("--").split(" --")
    last = {flag if flag.startswith("set ") else flag.partition(" ")[0]: flag for flag in words}
    return " ".join(f"--{flag}" for flag in last.values())


def _needs_of(job: JobSpec, *, replayed: bool = True) -> _Needs | None:
    """Return a job's needs; None if the engine does not support it.

    Without ``replayed`` a job fits if its peak does: a replay takes a hundred times as long.
    """
    recipe = job.recipe
    if recipe.engine == "deepspeed":  # changes for DDP and FSDP2 say nothing to it, and must not count as another job
        from zeroplan.engines.deepspeed import steps_in_own_kernel  # noqa: PLC0415  keeps start-up fast

        impl = None if steps_in_own_kernel(recipe) else recipe.optimizer_impl
        job = replace(job, recipe=replace(recipe, ddp=DdpOptions(), optimizer_impl=impl))
    return _counted(job, replayed=replayed)


@lru_cache(maxsize=256)
def _counted(job: JobSpec, *, replayed: bool) -> _Needs | None:
    """Count a job's needs. Cached, since combinations try the same job repeatedly."""
    try:
        answer = judged(job) if replayed else estimate(job)
    except SpecError:
        return None
    there = (answer.host_bytes_per_node or answer.host_bytes) <= MOST_HOST_BYTES
    fits = answer.fits is True and there and (not replayed or _can_free_enough(answer))
    expandable = answer.needs_expandable_segments
    return _Needs(fits, answer.least_bytes, answer.room_bytes or 0, answer.verdict == "tight", expandable)


def _can_free_enough(answer: Estimate) -> bool:
    """Whether the peak fits beside the cache that the allocator could not free in similar jobs; a replay has counted that."""
    room = answer.allocator_room_bytes
    return room is None or answer.replay is not None or int(answer.under_pressure()[1]) <= room


def _combined(job: JobSpec, kinds: Sequence[_Kind]) -> Remedy | None:
    """Combine the strongest change of every kind until the job fits; then weaken or remove changes, the costliest first.

    First only the found combination is replayed. If it does not fit then, every combination on the way is.
    """
    heap: list[tuple[_Candidate, ...]] = []
    current = job
    for kind in kinds:
        options = _up_to_the_strongest(current, kind)
        if not options:
            continue
        heap.append(options)
        current = options[-1].applied_to(current)
        for replayed in (False, True):
            if not _fits_after(job, [one[-1] for one in heap], replayed=replayed):
                break
            if found := _tried(job, _taken_back(job, heap, replayed=replayed)):
                return found
    return None


def _up_to_the_strongest(job: JobSpec, kind: _Kind) -> tuple[_Candidate, ...]:
    """The changes of a kind, from the mildest to the strongest that the engine supports for this job; empty if none is."""
    options = tuple(kind(job))
    for count in range(len(options), 0, -1):
        try:
            changed = options[count - 1].applied_to(job)
        except SpecError:
            continue
        if _needs_of(changed, replayed=False) is not None:
            return options[:count]
    return ()


def _taken_back(job: JobSpec, heap: Sequence[tuple[_Candidate, ...]], *, replayed: bool) -> list[_Candidate]:
    chosen: list[tuple[_Candidate, ...]] = [options[-1:] for options in heap]
    for position in reversed(range(len(heap))):
        before, after = _joined(chosen[:position]), _joined(chosen[position + 1 :])
        milder = ((), *((one,) for one in heap[position]))  # the last one is the current choice, which fits
        chosen[position] = next(one for one in milder if _fits_after(job, [*before, *one, *after], replayed=replayed))
    return _joined(chosen)


def _joined(chosen: Sequence[tuple[_Candidate, ...]]) -> list[_Candidate]:
    return [one for each in chosen for one in each]


def _with_recipe(change: str, flags: str, **fields: object) -> _Candidate:
    return _Candidate(change, flags, lambda job: replace(job, recipe=replace(job.recipe, **fields)))  # type: ignore[arg-type]


def _with_batch(change: str, flags: str, **fields: int) -> _Candidate:
    return _Candidate(change, flags, lambda job: replace(job, batch=replace(job.batch, **fields)))


def _lighter_step(job: JobSpec) -> Iterator[_Candidate]:
    """Yield each change that costs nothing, then all of them together."""
    each = list(_free_changes(job.recipe))
    yield from each
    if len(each) > 1:
        yield _Candidate(
            "; ".join(one.change for one in each), " ".join(one.flags for one in each), lambda job: _all_applied(job, each)
        )


def _all_applied(job: JobSpec, changes: Sequence[_Candidate]) -> JobSpec:
    for one in changes:
        job = one.applied_to(job)
    return job


def _free_changes(recipe: RecipeSpec) -> Iterator[_Candidate]:
    if recipe.optimizer in ADAM and step_implementation(recipe) not in ("fused", None):
        yield _with_recipe("use the fused optimizer step", "--optimizer-impl fused", optimizer_impl="fused")
    if recipe.engine == "ddp" and not recipe.ddp.gradient_as_bucket_view:
        view, flags = DdpOptions(gradient_as_bucket_view=True), "--set ddp.gradient_as_bucket_view=true"
        yield _with_recipe("keep gradients as views of DDP's buckets", flags, ddp=view)
    if recipe.attention == "eager":
        yield _with_recipe("use fused attention", "--attention sdpa", attention="sdpa")
    if recipe.keep_logits:
        yield _with_recipe("free the logits before the backward", "--keep-logits no", keep_logits=False)
    if not recipe.sync_every_micro_batch:
        change = "reduce gradients after every micro-batch"
        yield _with_recipe(change, "--sync-every-micro-batch", sync_every_micro_batch=True)


def _lighter_loss(job: JobSpec) -> Iterator[_Candidate]:
    """Fuse head and loss, so that logits are never whole; not with stage 3 of DeepSpeed, whose head is sharded."""
    recipe = job.recipe
    if recipe.loss == "full" and not (recipe.engine == "deepspeed" and recipe.zero_stage == 3):
        change = "fuse the head and the loss (Liger's kernel)"
        if recipe.keep_logits:
            yield _with_recipe(change, "--loss fused --keep-logits no", loss="fused", keep_logits=False)
        else:
            yield _with_recipe(change, "--loss fused", loss="fused")


def _recompute(job: JobSpec) -> Iterator[_Candidate]:
    if job.recipe.recompute == "none":
        yield _with_recipe("recompute selectively", "--recompute selective", recompute="selective")
    layers = job.model.num_hidden_layers
    if job.recipe.recompute_layers is not None and (job.recipe.recompute, job.recipe.recompute_layers) != ("full", layers):
        flags = f"--recompute full --recompute-layers {layers}"
        yield _with_recipe("recompute every block", flags, recompute="full", recompute_layers=layers)
    elif job.recipe.recompute != "full":
        yield _with_recipe("recompute every block", "--recompute full", recompute="full")


def _offloaded_activations(job: JobSpec) -> Iterator[_Candidate]:
    if job.recipe.recompute != "none" and not job.recipe.offload_activations:
        yield _with_recipe("keep inputs of blocks in host memory", "--offload-activations", offload_activations=True)


def _offloaded_states(job: JobSpec) -> Iterator[_Candidate]:
    """Offload states to host memory, as far as the engine supports it."""
    recipe = job.recipe
    both = "--offload-optimizer cpu --offload-param cpu"
    if recipe.engine == "fsdp2" and not recipe.fsdp2.cpu_offload:
        change = "keep parameters, gradients and optimizer in host memory"
        yield _with_recipe(change, both, fsdp2=replace(recipe.fsdp2, cpu_offload=True))
    if recipe.engine != "deepspeed" or recipe.zero_stage == 0:
        return
    options = replace(recipe.deepspeed, offload_optimizer="cpu")
    if recipe.deepspeed.offload_optimizer == "none":
        yield _with_recipe("keep the optimizer in host memory", "--offload-optimizer cpu", deepspeed=options)
    if recipe.zero_stage == 3 and recipe.deepspeed.offload_param == "none":
        change = "keep parameters and the optimizer in host memory"
        yield _with_recipe(change, both, deepspeed=replace(options, offload_param="cpu"))


def _higher_stage(job: JobSpec) -> Iterator[_Candidate]:
    if job.mesh.dp_shard == 1:
        return
    stages: tuple[Stage, ...] = (1, 2, 3)
    for stage in stages[job.recipe.zero_stage :]:
        yield _at_stage(job.recipe, stage)


def _at_stage(recipe: RecipeSpec, stage: Stage) -> _Candidate:
    engine = engine_at(stage, recipe.engine)
    other = "" if engine == recipe.engine else f", which takes {engine} instead of {recipe.engine}"
    flags = f"--stage {stage} --engine {engine}"
    reentrant = recipe.reentrant if engine == "ddp" else None  # modelled for DDP only
    return _with_recipe(
        f"shard more: ZeRO stage {stage}{other}", flags, zero_stage=stage, engine=engine, reentrant=reentrant,
        fused_kernels=kernels_under(engine, recipe.fused_kernels),
    )  # fmt: skip


def _arranged(job: JobSpec, *, gpus: int, replicas: int) -> JobSpec:
    """The job on this many GPUs (a multiple of its own) with this many replicas (a divisor of its own)."""
    return replace(job, mesh=replace(job.mesh, dp_replicate=replicas, dp_shard=gpus // (replicas * job.mesh.model_ranks)))


def _fewer_replicas(job: JobSpec) -> Iterator[_Candidate]:
    """Shard over ranks that now hold replicas."""
    replicas = job.mesh.dp_replicate
    while job.recipe.zero_stage > 0 and replicas > 1:
        replicas //= _smallest_factor(replicas)
        yield _in_replicas(replicas)


def _in_replicas(replicas: int) -> _Candidate:
    change = "shard over all ranks, no replicas" if replicas == 1 else f"fewer replicas, each on more ranks: {replicas:,}"
    return _Candidate(change, f"--replicas {replicas}", lambda job: _arranged(job, gpus=job.mesh.world_size, replicas=replicas))


def _even_shards(job: JobSpec) -> Iterator[_Candidate]:
    """Use DeepSpeed where FSDP2 shards experts unevenly: it shards dim 0, and the ranks do not divide the number of experts."""
    moe = job.model.moe
    if job.recipe.engine == "fsdp2" and moe is not None and moe.num_experts % job.mesh.dp_shard and job.mesh.dp_replicate == 1:
        change = f"shard evenly, which FSDP2 cannot with {moe.num_experts} experts on so many ranks"
        yield _with_recipe(change, "--engine deepspeed", engine="deepspeed")


def _fewer_sequences(job: JobSpec) -> Iterator[_Candidate]:
    sequences, steps = job.batch.micro_batch_size, job.batch.grad_accum_steps
    while sequences > 1:
        factor = _smallest_factor(sequences)
        sequences, steps = sequences // factor, steps * factor
        flags = f"--micro-batch {sequences} --grad-accum {steps}"
        change = f"smaller micro-batches, more of them: {sequences:,}"
        smaller = _with_batch(change, flags, micro_batch_size=sequences, grad_accum_steps=steps)
        yield _unpadded(smaller) if sequences == 1 and job.recipe.padded else smaller


def _unpadded(smaller: _Candidate) -> _Candidate:
    """One sequence alone has no other to be as long as."""
    unpadded = _with_recipe("no padding", "--no-padded", padded=False)
    return _Candidate(smaller.change, f"{smaller.flags} {unpadded.flags}", lambda job: _all_applied(job, (smaller, unpadded)))


def _smallest_factor(number: int) -> int:
    """The smallest prime factor; the number itself if that factor is above 1,000."""
    return next((factor for factor in range(2, 1000) if number % factor == 0), number)


def _shorter_sequences(job: JobSpec) -> Iterator[_Candidate]:
    seq_len = job.batch.seq_len // 2
    while seq_len >= _SHORTEST:
        yield _with_batch(f"shorter sequences: {seq_len:,} tokens", f"--seq-len {seq_len}", seq_len=seq_len)
        seq_len //= 2


def _more_gpus(job: JobSpec) -> Iterator[_Candidate]:
    """Double the GPUs; if one rank holds everything, also at stage 3."""
    recipe, world = job.recipe, job.mesh.world_size
    doubled = [gpus for doublings in range(1, 13) if (gpus := world << doublings) <= MOST_GPUS]
    if recipe.zero_stage > 0:
        yield from (_on_gpus(gpus, None) for gpus in doubled)
    if recipe.zero_stage < 3 and job.mesh.dp_shard == 1:
        yield from (_on_gpus(gpus, _at_stage(recipe, 3)) for gpus in doubled)


def _on_gpus(gpus: int, sharded: _Candidate | None) -> _Candidate:
    change, flags = f"more GPUs: {gpus:,}", f"--gpus {gpus}"
    if sharded is None:
        return _Candidate(change, flags, lambda job: _arranged(job, gpus=gpus, replicas=job.mesh.dp_replicate))
    return _Candidate(
        f"{change}; {sharded.change}",
        f"{flags} {sharded.flags}",
        lambda job: _arranged(sharded.applied_to(job), gpus=gpus, replicas=job.mesh.dp_replicate),
    )


def _smaller_state(job: JobSpec) -> Iterator[_Candidate]:
    if job.recipe.optimizer in ADAM and job.recipe.engine != "deepspeed":
        flags = "--optimizer adamw-8bit" + ("" if job.recipe.optimizer_impl is None else " --optimizer-impl fused")
        impl = None if job.recipe.optimizer_impl is None else "fused"
        yield _with_recipe("keep the optimizer state in 8 bits", flags, optimizer="adamw-8bit", optimizer_impl=impl)


def _weights_in_four_bits(job: JobSpec) -> Iterator[_Candidate]:
    """Quantise the frozen weights beside adapters, as QLoRA does (Dettmers et al., arXiv 2305.14314, section 3)."""
    adapter = job.model.adapter
    if adapter is not None and adapter.quantize == "none":
        choices: tuple[tuple[Quantize, str], ...] = (("nf4", ""), ("nf4-double", ", and their scales in 8"))
        for quantize, scales in choices:
            yield _quantised(f"keep frozen weights in 4 bits{scales} (QLoRA)", replace(adapter, quantize=quantize))
    elif adapter is not None and adapter.quantize == "nf4":
        yield _quantised("keep the scales of the 4-bit weights in 8 bits", replace(adapter, quantize="nf4-double"))


def _quantised(change: str, adapter: AdapterSpec) -> _Candidate:
    flags = f"--quantize {adapter.quantize}"
    return _Candidate(change, flags, lambda job: replace(job, model=replace(job.model, adapter=adapter)))


#: From changes that cost nothing to those that change the training or the bill.
_KINDS: tuple[_Kind, ...] = (
    _lighter_step, _lighter_loss, _recompute, _higher_stage, _fewer_replicas, _even_shards, _offloaded_activations,
    _fewer_sequences, _weights_in_four_bits, _offloaded_states, _shorter_sequences, _more_gpus, _smaller_state,
)  # fmt: skip
#: Changes that are slow, need more GPUs, or change the training.
_COSTLY: frozenset[_Kind] = frozenset(
    (_weights_in_four_bits, _offloaded_states, _shorter_sequences, _more_gpus, _smaller_state)
)
#: The order of combining: sharding is free on the same GPUs, shorter sequences change the training. `_even_shards` comes twice,
#: since more GPUs may no longer divide the experts.
_COMBINED_WITH_MORE_GPUS: tuple[_Kind, ...] = (
    _lighter_step, _higher_stage, _fewer_replicas, _lighter_loss, _recompute, _fewer_sequences, _even_shards, _more_gpus,
    _even_shards, _shorter_sequences,
)  # fmt: skip
#: The same without more GPUs or shorter sequences. Offload is slow: it comes last, so it is the first to be removed.
_COMBINED_ON_THESE_GPUS: tuple[_Kind, ...] = (
    _lighter_step, _higher_stage, _fewer_replicas, _lighter_loss, _recompute, _fewer_sequences, _even_shards,
    _weights_in_four_bits, _offloaded_states, _offloaded_activations,
)  # fmt: skip
