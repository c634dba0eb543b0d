"""Replays a predicted step through the model of CUDA's caching allocator: how much is reserved, and how much of that is unusable.

The engines' programs say every request in order (:mod:`zeroplan.engines.requests`). cuBLAS takes a workspace at the first product
of matrices of the forward's thread and of autograd's: when it is called, and so after the product's output. Recorded runs on fake
tensors are replayed with it before the output.
"""

from collections.abc import Iterable
from functools import cached_property
from typing import NamedTuple

from zeroplan.allocator import CachingAllocator, CardFullError, Chunk
from zeroplan.engines.device import workspace_line
from zeroplan.engines.replayed_shares import off_by
from zeroplan.engines.requests import requests_of
from zeroplan.engines.requests.log import Call, Log, Request, Starts
from zeroplan.engines.requests.model import ENDING
from zeroplan.ledger import Band, Phase
from zeroplan.measurement import AllocatorSettings
from zeroplan.script_trace import Blocks, CollectiveRecorded, SpanRecorded, Trace
from zeroplan.spec.job import JobSpec

_THREADS = 2
"""The forward pass runs in one thread, autograd in another, and each has a handle of cuBLAS with a workspace."""


class Replayed(NamedTuple):
    """What the allocator shows after the steps, with some settings, on a card that never runs out. [bytes]"""

    allocated_bytes: int
    """``max_memory_allocated`` of the last step."""
    reserved_bytes: int
    """``max_memory_reserved`` of all."""
    unusable_bytes: int
    """Memory that was free when the allocator last took more from the card, in blocks too small or for another stream."""


class OnCard(NamedTuple):
    """The result of the steps on a card that has so much for the allocator."""

    fits: bool
    retries: int
    """How often cached blocks went back to the driver to make room (``num_alloc_retries``)."""
    phase: Phase | None
    """Where it ran out of memory, if it did."""
    free_bytes: int
    """Memory that was reserved but not in use then, and that the request could not use."""


class Full(NamedTuple):
    """A request that the allocator cannot meet: its place among the log's deeds, and what it had then. [bytes]"""

    at: int
    allocated_bytes: int
    reserved_bytes: int


class StepReplay:
    """The first steps of a job, and what the allocator makes of them.

    The GPU is as far behind the program as the engine lets it be, or is said to keep up (``keeps_up``): what another stream uses is
    then free as soon as it is released.
    """

    def __init__(
        self, job: JobSpec, *, pipeline_rank: int | None = None, starts: Starts = "loaded", keeps_up: bool = False
    ) -> None:  # fmt: skip
        """Write the steps out, of a pipeline those of the fullest rank or of another. Raises SpecError where they are not known.

        ``starts`` says where the weights are before the engine takes them.
        """
        self.job, self.keeps_up = job, keeps_up
        self.log = requests_of(job, pipeline_rank=pipeline_rank, starts=starts)
        self._workspace_bytes = int(workspace_line(job.cluster.gpu).n_bytes) // _THREADS
        self._done: dict[AllocatorSettings, Replayed] = {}
        self._cards: dict[tuple[int, AllocatorSettings], OnCard] = {}

    def replayed(self, settings: AllocatorSettings = "default") -> Replayed:
        """What the allocator shows in the end.

        >>> from zeroplan import job
        >>> shown = StepReplay(job(model="gpt2", gpus=8, stage=3, seq_len=128)).replayed()
        >>> shown.allocated_bytes <= shown.reserved_bytes
        True
        """
        if settings not in self._done:
            self._done[settings] = self._play(_endless(settings), keeps_up=self.keeps_up)
        return self._done[settings]

    def _least_bytes(self, settings: AllocatorSettings) -> int:
        """What is reserved if the GPU keeps up."""
        if not self.log.marked or self.keeps_up:
            return self.replayed(settings).reserved_bytes
        return min(self.replayed(settings).reserved_bytes, self._play(_endless(settings), keeps_up=True).reserved_bytes)

    def band(self, settings: AllocatorSettings = "default") -> Band:
        """What is reserved, with how far off replays of an engine's steps were where its code ran. [bytes]"""
        reserved, (low, high) = self.replayed(settings).reserved_bytes, off_by(self.job.recipe, settings)
        least = max(self._least_bytes(settings) * low // 1000, self.replayed(settings).allocated_bytes)
        return Band(min(least, reserved), reserved, reserved * high // 1000)

    def on_card(self, room_bytes: int, settings: AllocatorSettings = "default") -> OnCard:
        """The result of it where the allocator may take so much."""
        key = room_bytes, settings
        if key not in self._cards:
            self._cards[key] = self._outcome(*key)
        return self._cards[key]

    def _outcome(self, room_bytes: int, settings: AllocatorSettings) -> OnCard:
        if self.replayed(settings).reserved_bytes <= room_bytes:
            return OnCard(fits=True, retries=0, phase=None, free_bytes=0)
        card, full_at = self._on_card(room_bytes, settings)
        if full_at is None:
            return OnCard(fits=True, retries=card.retries, phase=None, free_bytes=0)
        phase = next(span.phase for span in reversed(self.log.spans) if span.start <= full_at)
        return OnCard(fits=False, retries=card.retries, phase=phase, free_bytes=card.reserved_bytes - card.allocated_bytes)

    def full_at(self, room_bytes: int, settings: AllocatorSettings = "default") -> "Full | None":
        """Return where the allocator runs out, where it may take so much; None where it does not."""
        card, full_at = self._on_card(room_bytes, settings)
        return None if full_at is None else Full(full_at, card.allocated_bytes, card.reserved_bytes)

    def _on_card(self, room_bytes: int, settings: AllocatorSettings) -> tuple[CachingAllocator, int | None]:
        """An allocator that may take so much, after the steps, and the deed at which it ran out."""
        card = CachingAllocator(expandable_segments=settings == "expandable_segments", room_bytes=room_bytes)
        try:
            self._play(card, keeps_up=self.keeps_up)
        except _FullAtError as full:
            return card, full.at
        return card, None

    @cached_property
    def _products(self) -> frozenset[int]:
        return frozenset(self.log.products.values())

    def _play(self, card: CachingAllocator, *, keeps_up: bool) -> Replayed:
        """The card at the end of the replay; raises _FullAtError if it runs out of memory."""
        requests, chunks = self.log.requests, dict[int, Chunk]()
        marked = frozenset[int]() if keeps_up else self.log.marked
        last = next(span.start for span in self.log.spans if span.step == self.log.spans[-1].step)
        early, late = (self._products, ()) if self.log.starts == "recorded" else ((), self._products)
        highest = unusable = at = 0
        try:
            for at, deed in enumerate(self.log.deeds):
                if at in early:
                    card.request(self._workspace_bytes)
                if at in self.log.waits:
                    card.reached(self.log.waits[at])
                if deed < 0:
                    card.release(chunks.pop(-1 - deed), once_at=at if -1 - deed in marked else None)
                    continue
                before, free = card.reserved_bytes, card.reserved_bytes - card.allocated_bytes
                chunks[deed] = card.request(requests[deed].n_bytes, requests[deed].stream)
                if at in late:
                    card.request(self._workspace_bytes)
                unusable = free if card.reserved_bytes > before else unusable
                highest = max(highest, card.allocated_bytes) if at >= last else 0
        except CardFullError:
            raise _FullAtError(at) from None
        return Replayed(highest, card.highest_bytes, unusable)


def _endless(settings: AllocatorSettings) -> CachingAllocator:
    """An allocator on a card that never runs out."""
    return CachingAllocator(expandable_segments=settings == "expandable_segments")


class _FullAtError(Exception):
    """The card was full at a deed of the log, which is counted from 0."""

    def __init__(self, at: int) -> None:
        super().__init__(at)
        self.at = at


_MODULES = {-1: "embedding", ENDING: "final norm, head and loss"}


def trace_of(log: Log) -> Trace:
    """The requests as a dry run records them, for everything that reads those. One deed is one moment."""
    born, died, span_of = [0] * len(log.requests), [len(log.deeds) + 1] * len(log.requests), [0] * len(log.requests)
    span = -1
    for moment, deed in enumerate(log.deeds, 1):
        while span + 1 < len(log.spans) and log.spans[span + 1].start < moment:
            span += 1
        if deed < 0:
            died[-1 - deed] = moment
        else:
            born[deed], span_of[deed] = moment, span
    reasons, kinds, modules = (_table(column) for column in zip(*map(_named, log.requests), strict=True))
    return Trace(
        moments=len(log.deeds),
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
    """Return the name of a layer's module."""
    return _MODULES.get(layer) or f"layers.{layer}"


def _table(names: Iterable[str]) -> dict[str, int]:
    return {name: place for place, name in enumerate(dict.fromkeys(names))}


def _call(one: Call) -> CollectiveRecorded:
    return CollectiveRecorded(
        operation=one.operation, dtype="", group=one.ranks, n_bytes=one.n_bytes, moment=one.start, among=one.among.value
    )  # fmt: skip
