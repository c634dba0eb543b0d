"""How much memory does the caching allocator reserve in a predicted step, and how much of that is unusable?

The engines' programs write every request in order (:mod:`zeroplan.engines.requests`), and this file replays them through
:mod:`zeroplan.allocator`. cuBLAS requests a workspace in the first matrix product of the forward's thread and of autograd's,
after the product's output. Recorded runs on fake tensors are replayed with the workspace before the output.
"""

from collections.abc import Hashable, Iterable, Sequence
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple
from zlib import crc32

from zeroplan.allocator import CachingAllocator, CardFullError, Chunk, counted_bytes
from zeroplan.engines.device import workspace_line
from zeroplan.engines.replayed_shares import off_by
from zeroplan.engines.requests import STEPS, program_of, refuse_unwritten, requests_of
from zeroplan.engines.requests.log import Call, Log, Part, Request, Starts
from zeroplan.engines.requests.model import ENDING, ModelPass
from zeroplan.ledger import Band, Phase
from zeroplan.script_trace import Blocks, CollectiveRecorded, SpanRecorded, Trace
from zeroplan.spec.hardware import AllocatorSettings
from zeroplan.spec.job import JobSpec
from zeroplan.timeline import own_pools
from zeroplan.units import MIB
from zeroplan.weights import ONE_POOL

_THREADS = 2
"""The forward runs in one thread and autograd in another; each has its own cuBLAS handle with a workspace."""

_DRAWS = 1
"""Further replays with larger blocks, for each way to keep blocks equal."""
_UNIT, _UNITS = 512, 8
"""The allocator's rounding [bytes], and the number of sizes that a large block can get."""


class Replayed(NamedTuple):
    """The allocator's counters after the steps, on a GPU with unlimited memory. [bytes]"""

    allocated_bytes: int
    """``max_memory_allocated`` of the last step."""
    reserved_bytes: int
    """``max_memory_reserved`` of all steps."""
    unusable_bytes: int
    """Cached memory that was free when the allocator last reserved more, in blocks that were too small or on another stream."""


class OnCard(NamedTuple):
    """The result of the steps with limited memory for the allocator."""

    fits: bool
    retries: int
    """How often the allocator freed its cache and retried (``num_alloc_retries``)."""
    phase: Phase | None
    """The phase in which it ran out of memory; None if it did not."""
    free_bytes: int
    """Reserved memory that was free when it ran out, and that the failed request could not use. [bytes]"""
    highest_bytes: int
    """The most that the allocator reserved. [bytes]"""


class Full(NamedTuple):
    """The request at which the GPU is full: its index in the log's ``events``, and the allocator's counters then. [bytes]"""

    at: int
    allocated_bytes: int
    reserved_bytes: int


class StepReplay:
    """The first steps of a job, replayed through the allocator's model.

    By default the GPU lags behind the program as far as the engine lets it. With ``keeps_up`` it does not lag: a block that another
    stream uses is free as soon as it is released.
    """

    def __init__(
        self, job: JobSpec, *, pipeline_rank: int | None = None, starts: Starts = "loaded", keeps_up: bool = False
    ) -> None:  # fmt: skip
        """Prepare to write the job's requests. Raises SpecError if zeroplan does not know them.

        ``pipeline_rank`` defaults to the rank with the highest peak. ``starts``: where the weights are before wrapping.
        """
        refuse_unwritten(job)
        self.job, self.keeps_up = job, keeps_up
        self._rank, self._starts = pipeline_rank, starts
        self._workspace_bytes = int(workspace_line(job.cluster.gpu).n_bytes) // _THREADS
        self._done: dict[AllocatorSettings, Replayed] = {}
        self._ends: dict[AllocatorSettings, tuple[int, int]] = {}
        self._cards: dict[tuple[int, AllocatorSettings], OnCard] = {}

    @cached_property
    def log(self) -> Log:
        """The requests of all steps."""
        if self._program is None:
            return requests_of(self.job, pipeline_rank=self._rank, starts=self._starts)
        return self._program.run(STEPS[self.job.recipe.engine])

    @cached_property
    def _program(self) -> ModelPass | None:
        """The program that writes the requests, after the first micro-batch; None in a pipeline, whose ranks begin with several."""
        if self.job.mesh.pp > 1:
            return None
        program = program_of(self.job, starts=self._starts)
        program.run_first()
        return program

    @property
    def _written(self) -> Log:
        """The requests that are written: of all steps, or of the first micro-batch, which is enough for many answers."""
        return self.log if "log" in vars(self) or self._program is None else self._program.log

    def replayed(self, settings: AllocatorSettings = "default") -> Replayed:
        """The allocator's counters at the end.

        >>> from zeroplan import job
        >>> shown = StepReplay(job(model="gpt2", gpus=8, stage=3, seq_len=128)).replayed()
        >>> shown.allocated_bytes <= shown.reserved_bytes
        True
        """
        if settings not in self._done:
            self._done[settings] = self._play(_endless(settings), keeps_up=self.keeps_up)
        return self._done[settings]

    def ends(self, settings: AllocatorSettings = "default") -> tuple[int, int]:
        """The least and the most reserved bytes over what a replay cannot know. [bytes]

        * Timing: a block that another stream uses is free at once, or as late as the engine lets the GPU lag.
        * Start: FSDP1 wraps weights that were loaded to host memory, or that were built on the GPU.
        * Fit: a few bytes decide which hole a block gets. So the steps are also replayed with slightly larger blocks.
        """
        if settings not in self._ends:
            elsewhere = self.job.recipe.engine == "fsdp1" and self._starts == "loaded"
            starts = [self, StepReplay(self.job, starts="built", keeps_up=self.keeps_up)] if elsewhere else [self]
            found = [shown for one in starts for shown in one.timed(settings)]
            found += [self._play(_endless(settings), keeps_up=self.keeps_up, sizes=sizes) for sizes in self._larger]
            reserved = [one.reserved_bytes for one in found]
            self._ends[settings] = min(reserved), max(reserved)
        return self._ends[settings]

    def timed(self, settings: AllocatorSettings) -> tuple[Replayed, ...]:
        """The counters on a GPU that lags and, if that makes a difference, on one that keeps up."""
        either = self.log.marked and not self.keeps_up
        return self.replayed(settings), *((self._play(_endless(settings), keeps_up=True),) if either else ())

    def band(self, settings: AllocatorSettings = "default") -> Band:
        """The reserved bytes, from :meth:`ends`, with the errors of such ends against runs of the engine's own code. [bytes]"""
        reserved, (low, high) = self.replayed(settings), off_by(settings)
        least, most = self.ends(settings)
        least = max(least * low // 1000, reserved.allocated_bytes)
        return Band(
            min(least, reserved.reserved_bytes), reserved.reserved_bytes, max(most * high // 1000, reserved.reserved_bytes)
        )

    @property
    def is_covered(self) -> bool:
        """Whether records and replays cover what decides the reserve of such jobs.

        No record has ranks that split the model, or weights that loading quantizes on the GPU. DeepSpeed marks memory that its
        other streams use (``record_stream`` in stage3.py, stage_1_and_2.py and partition_parameters.py of 0.19.8); its requests
        do not, so they are replayed only as on a GPU that keeps up.
        """
        mesh, recipe = self.job.mesh, self.job.recipe
        splits = max(mesh.tp, mesh.cp, mesh.pp, mesh.ep) > 1
        lags = recipe.engine == "deepspeed" and own_pools(recipe) != ONE_POOL
        return not (splits or lags or self.job.model.is_quantised)

    def fits(self, room_bytes: int, settings: AllocatorSettings = "default") -> bool:
        """Whether the steps have enough memory if the allocator may reserve at most ``room_bytes``."""
        return self._least_bytes <= room_bytes and self.on_card(room_bytes, settings).fits

    @cached_property
    def _least_bytes(self) -> int:
        """The most that the requests written by then hold at a time. No allocator can reserve less. [bytes]"""
        return _held_bytes(self._written)

    @cached_property
    def held_bytes(self) -> int:
        """The most that the requests hold at a time, in the allocator's units. No allocator can reserve less. [bytes]"""
        return _held_bytes(self.log)

    def on_card(self, room_bytes: int, settings: AllocatorSettings = "default") -> OnCard:
        """The result of the steps if the allocator may reserve at most ``room_bytes``."""
        key = room_bytes, settings
        if key not in self._cards:
            self._cards[key] = self._outcome(*key)
        return self._cards[key]

    def _outcome(self, room_bytes: int, settings: AllocatorSettings) -> OnCard:
        done = self._done.get(settings)
        if done is not None and done.reserved_bytes <= room_bytes:
            return OnCard(fits=True, retries=0, phase=None, free_bytes=0, highest_bytes=done.reserved_bytes)
        card, full_at = self._on_card(room_bytes, settings)
        most = card.highest_bytes
        if full_at is None:
            return OnCard(fits=True, retries=card.retries, phase=None, free_bytes=0, highest_bytes=most)
        phase = next(span.phase for span in reversed(self._written.spans) if span.start <= full_at)
        free = card.reserved_bytes - card.allocated_bytes
        return OnCard(fits=False, retries=card.retries, phase=phase, free_bytes=free, highest_bytes=most)

    def full_at(self, room_bytes: int, settings: AllocatorSettings = "default") -> "Full | None":
        """Return the request at which an allocator with ``room_bytes`` runs out of memory; None if it does not."""
        card, full_at = self._on_card(room_bytes, settings)
        return None if full_at is None else Full(full_at, card.allocated_bytes, card.reserved_bytes)

    def _on_card(self, room_bytes: int, settings: AllocatorSettings) -> tuple[CachingAllocator, int | None]:
        """An allocator with ``room_bytes`` after the steps, and the index of the event at which it ran out of memory, if it did.

        Most jobs that run out do so in their first micro-batch, which is replayed before all steps are written.
        """
        card = CachingAllocator(expandable_segments=settings == "expandable_segments", room_bytes=room_bytes)
        playing = _Playing(self._written, card, self._workspace_bytes, keeps_up=self.keeps_up)
        try:
            if "log" not in vars(self):
                playing.run()
                playing.log = self.log  # the program writes on
            done = playing.run()
        except _FullAtError as full:
            return card, full.at
        if not card.retries:  # then the room made no difference
            self._done[settings] = done
        return card, None

    @cached_property
    def _larger(self) -> tuple[list[int], ...]:
        """The sizes of all requests with those of large blocks up to 3.5 KiB larger, in several draws. [bytes]

        Half of the draws enlarge all requests of one size equally; the other half, all requests made for one reason.
        """
        requests, sizes = self.log.requests, [one.n_bytes for one in self.log.requests]
        keys = (sizes, [one.reason for one in requests])
        return tuple(_enlarged(sizes, key, draw) for key in keys for draw in range(_DRAWS))

    def _play(self, card: CachingAllocator, *, keeps_up: bool, sizes: Sequence[int] = ()) -> Replayed:
        """Replay the steps on this allocator and return its counters; raises _FullAtError if it runs out of memory.

        ``sizes`` replaces the sizes of all requests.
        """
        return _Playing(self.log, card, self._workspace_bytes, keeps_up=keeps_up, sizes=sizes).run()


def _unrecorded(log: Log) -> frozenset[int]:
    """The requests that a run on fake tensors does not record: scratch inside CUDA's kernels."""
    scratch = (at for at, one in enumerate(log.requests) if one.is_scratch)
    return frozenset(scratch if log.starts == "recorded" else ())


def _held_bytes(log: Log) -> int:
    """The most that the requests hold at a time, in the allocator's units. [bytes]"""
    unrecorded = _unrecorded(log)
    sizes = [0 if at in unrecorded else counted_bytes(one.n_bytes) for at, one in enumerate(log.requests)]
    return max(accumulate(sizes[event] if event >= 0 else -sizes[-1 - event] for event in log.events), default=0)


class _Part(NamedTuple):
    """A part of the log that left the allocator's free memory as it was: this memory, and the part's effect on the counters."""

    free: Hashable
    retries: int
    highest: int
    """The most allocated bytes."""
    unusable: int | None
    """The unusable bytes when the allocator last reserved more; None if it did not."""


class _Playing:
    """A replay of a log on an allocator."""

    def __init__(
        self, log: Log, card: CachingAllocator, workspace_bytes: int, *, keeps_up: bool, sizes: Sequence[int] = ()
    ) -> None:
        """``sizes`` replaces the sizes of all requests."""
        self.log, self.card, self.workspace, self.others = log, card, workspace_bytes, sizes
        self.chunks = dict[int, Chunk]()
        self.marked = frozenset[int]() if keeps_up else log.marked
        self.known: dict[Part | None, _Part] = {}
        self.at = self.unusable = 0

    def run(self) -> Replayed:
        """Replay the log from where the last call ended, and return the counters at its end.

        A part that is repeated on the same free memory changes nothing, so it is not replayed again.
        """
        log, card, known, highest, unusable = self.log, self.card, self.known, 0, self.unusable
        self.sizes, self.streams = self.others or [one.n_bytes for one in log.requests], [one.stream for one in log.requests]
        products, nothing = frozenset(log.products.values()), frozenset[int]()
        self.early, self.late = (products, nothing) if log.starts == "recorded" else (nothing, products)
        self.unrecorded = _unrecorded(log)
        last = next(span.start for span in log.spans if span.step == log.spans[-1].step)
        for start, stop, part in log.stretches(self.at, last):
            if start < self.at:
                continue
            free, done = None if part is None else card.free, known.get(part)
            if done is None or done.free != free:
                retries, (most, grown) = card.retries, self._run(start, stop)
                done = _Part(free, card.retries - retries, most, grown)
                if free is not None and card.free == free:
                    known[part] = done
            else:
                card.retries += done.retries
            unusable = unusable if done.unusable is None else done.unusable
            highest = max(highest, done.highest) if start >= last else 0
        self.at, self.unusable = len(log.events), unusable
        return Replayed(highest, card.highest_bytes, unusable)

    def _run(self, start: int, stop: int) -> tuple[int, int | None]:
        """Replay events; return the most allocated bytes, and the unusable ones when it last reserved more, or None."""
        card, chunks, unrecorded, waits, sizes = self.card, self.chunks, self.unrecorded, self.log.waits, self.sizes
        early, late, marked, streams = self.early, self.late, self.marked, self.streams
        request, release = card.request, card.release
        unusable: int | None = None
        most, at = 0, start
        try:
            for at, event in enumerate(self.log.events[start:stop], start):
                if at in early:
                    request(self.workspace)
                if at in waits:
                    card.reached(waits[at])
                if unrecorded and (event if event >= 0 else -1 - event) in unrecorded:
                    continue
                if event < 0:
                    release(chunks.pop(-1 - event), once_at=at if -1 - event in marked else None)
                    continue
                before, allocated = card.reserved_bytes, card.allocated_bytes
                chunks[event] = request(sizes[event], streams[event])
                if at in late:
                    request(self.workspace)
                if card.reserved_bytes > before:
                    unusable = before - allocated
                most = max(most, card.allocated_bytes)
        except CardFullError:
            raise _FullAtError(at) from None
        return most, unusable


def _enlarged(sizes: list[int], keys: Sequence[Hashable], draw: int) -> list[int]:
    """Return sizes, those over 1 MiB larger by 0 to 7 units of the allocator, the same for equal keys. [bytes]"""
    more = {key: _UNIT * (crc32(f"{draw} {key}".encode()) % _UNITS) for key in set(keys)}
    return [size + more[key] if size > MIB else size for size, key in zip(sizes, keys, strict=True)]


def _endless(settings: AllocatorSettings) -> CachingAllocator:
    """An allocator with unlimited memory."""
    return CachingAllocator(expandable_segments=settings == "expandable_segments")


class _FullAtError(Exception):
    """The GPU is full at this index of the log's events."""

    def __init__(self, at: int) -> None:
        super().__init__(at)
        self.at = at


_MODULES = {-1: "embedding", ENDING: "final norm, head and loss"}


def trace_of(log: Log) -> Trace:
    """The requests in the format of a dry run's trace, so that its readers work on a predicted step. One event is one moment."""
    born, died, span_of = [0] * len(log.requests), [len(log.events) + 1] * len(log.requests), [0] * len(log.requests)
    span = -1
    for moment, event in enumerate(log.events, 1):
        while span + 1 < len(log.spans) and log.spans[span + 1].start < moment:
            span += 1
        if event < 0:
            died[-1 - event] = moment
        else:
            born[event], span_of[event] = moment, span
    reasons, kinds, modules = (_table(column) for column in zip(*map(_named, log.requests), strict=True))
    return Trace(
        moments=len(log.events),
        operations=tuple(reasons),
        modules=tuple(modules),
        kinds=tuple(kinds),
        lines=("",),
        sources=("",),
        spans=tuple([SpanRecorded(step=one.step, phase=one.phase.value, start=one.start) for one in log.spans]),
        collectives=tuple([_call(one) for one in log.calls]),
        blocks=Blocks(
            n_bytes=tuple([one.n_bytes for one in log.requests]),
            born=tuple(born),
            died=tuple(died),
            operation=tuple([reasons[one.reason] for one in log.requests]),
            module=tuple([modules[module_of(one.layer)] for one in log.requests]),
            kind=tuple([kinds[one.kind.value] for one in log.requests]),
            line=(0,) * len(log.requests),
            span=tuple(span_of),
            stream=tuple([one.stream for one in log.requests]),
        ),
    )


def _named(one: Request) -> tuple[str, str, str]:
    return one.reason, one.kind.value, module_of(one.layer)


def module_of(layer: int) -> str:
    """Return the module's name for a layer's index."""
    return _MODULES.get(layer) or f"layers.{layer}"


def _table(names: Iterable[str]) -> dict[str, int]:
    return {name: place for place, name in enumerate(dict.fromkeys(names))}


def _call(one: Call) -> CollectiveRecorded:
    return CollectiveRecorded(
        operation=one.operation, dtype="", group=one.ranks, n_bytes=one.n_bytes, moment=one.start, among=one.among.value
    )  # fmt: skip
