"""The coordinator of DeepSpeed's ZeRO-3, request by request: its gathers, copies and releases in one pass."""

from collections.abc import Hashable, Iterator
from functools import lru_cache

from zeroplan.engines.deepspeed.coordinator import Pass, Replay
from zeroplan.engines.deepspeed.order import BACKWARD, Freed, Step
from zeroplan.engines.requests.log import Log
from zeroplan.ledger import Kind
from zeroplan.numeric import ceil_div, round_up

_HALF, _SCALE = 2, 4
"""Bytes of a dequantized element, and of a group's scale."""
Ends = tuple[tuple[int, Freed], ...]
"""Modules whose parameters may be released where a module ends, each with its step."""


class Gathers(Replay):
    """The coordinator of one pass. The key of a gathered parameter is its index in the row."""

    def __init__(
        self, one: Pass, log: Log, ranks: int, element: int, stream: int, *, recording: bool, resident: bool,
        decided: set[tuple[int, int]] | None, later: bool,
    ) -> None:  # fmt: skip
        """``recording``: the first pass, which prefetches nothing and releases all; ``resident``: persistent parameters exist.

        ``decided``: the releases that an earlier pass decided; ``later``: a pass of the same step came before.
        """
        super().__init__(one, persistent_missing=not resident, decided=set() if recording else decided, later=later)
        self.log, self.ranks, self.element, self.stream = log, ranks, element, stream
        self.recording, self.copied = recording, one.sharing.copied
        self.turned = False
        self.alone = ranks == 1 and not self.copied
        """A single rank's shards are whole parameters on the GPU, so a gather allocates nothing."""

    def begin(self, at: int) -> None:
        """Begin a module: gather its parameters and prefetch the next ones."""
        step, log = self.steps[at], self.log
        self.turned = self.turned or step.direction == BACKWARD
        log.stream = self.stream
        self._fetch(at, step, turned=self.turned)
        log.stream = 0
        self.in_graph.update(() if self.turned else step.in_graph)

    def end(self, ends: Ends) -> None:
        """End a module: release parameters that are not needed soon."""
        for at, freed in ends:
            self._free(at, freed, returning=self.steps[at].direction == BACKWARD)

    def _free(self, at: int, freed: Freed, *, returning: bool) -> None:
        if not self.recording:
            super()._free(at, freed, returning=returning)
            return
        for index in freed.parameters:
            if index in self.available:
                self._partition(index, saved=index in freed.saved)
            if returning:
                self._let_go(index)

    def end_pass(self) -> None:
        """Release what remains (``release_backward_leftovers``): parameters of modules whose end no hook sees."""
        for index in sorted(self.available - (frozenset() if self.recording else self.persistent)):
            self._partition(index, saved=False)

    def _prefetch(self, direction: str) -> None:
        if not self.recording:
            super()._prefetch(direction)

    def _gather(self, indices: list[int], direction: str) -> None:
        super()._gather(indices, direction)
        if not indices:
            return
        if self.sharing.width:
            self._gather_in_8_bits(sorted(indices))
            return
        for together in self._called(sorted(indices)):
            self._call(together)
        if not self._one_by_one(indices):
            n_bytes = self.element * sum(map(self._padded, indices))
            self.log.request(self._flat(indices[0]), n_bytes, Kind.GATHER, "flat all-gather of several parameters")
            self._copies(indices)

    def _gather_in_8_bits(self, indices: list[int]) -> None:
        """Quantize shards, and gather them with their scales (qwZ)."""
        flat, takes, reason = self._flat(indices[0]), self.in_flight[indices[0]].takes, "weights in 8 bits and their scales"
        for change in takes.requested:
            if change > 0:
                self.log.request(flat, self.element * change, Kind.GATHER, reason)
            else:
                self.log.part(flat, -self.element * change, "gone")
                self.log.release("gone")
        pieces = [self._piece(index) for index in indices]
        self.log.call("all_gather", sum(one.share * one.ranks for one in pieces), pieces[0].ranks)
        self.log.call("all_gather", _SCALE * takes.scales, pieces[0].ranks)

    def _restore(self, index: int) -> None:
        """``CUDAQuantizer.dequantize``: make a parameter in fp16, and cast it to its own dtype."""
        n_bytes = _HALF * self.numel[index]
        if self.sharing.half:
            self.log.request(gathered(index), n_bytes, Kind.GATHER, "gathered parameter")
            return
        self.log.request("restored", n_bytes, Kind.GATHER, "parameter in fp16, out of 8 bits")
        self.log.request(gathered(index), self.element * self.numel[index], Kind.GATHER, "gathered parameter")
        self.log.release("restored")

    def _called(self, indices: list[int]) -> Iterator[list[int]]:
        """Yield the parameters of each all-gather. A parameter that is gathered alone is gathered in place."""
        if not self._one_by_one(indices):
            yield indices
            return
        for index in indices:
            yield [index]
            if not self.alone:
                self.log.request(gathered(index), self.element * self._padded(index), Kind.GATHER, "gathered parameter")
            if self.ranks > 1:
                self._copies([index])

    def _one_by_one(self, indices: list[int]) -> bool:
        return len(indices) == 1 or self.options.stage3_allgather_sequential or self.ranks == 1

    def _padded(self, index: int) -> int:
        return round_up(self.numel[index], self.ranks)

    def _flat(self, index: int) -> Hashable:
        return "flat", id(self.in_flight[index])

    def _copies(self, indices: list[int]) -> None:
        """Copy this rank's shards to the GPU, if they are in host memory."""
        for index in indices if self.copied else ():
            n_bytes = self.element * ceil_div(self.numel[index], self.ranks)
            self.log.request("copy of shares", n_bytes, Kind.GATHER, "copy of this rank's share")
        self.log.release("copy of shares")

    def _call(self, indices: list[int]) -> None:
        second = self.options.zero_hpz_partition_size
        within = self.ranks if second == 1 or indices[0] in self.second else second
        n_bytes = self.element * sum(round_up(self.numel[index], self.ranks) for index in indices)
        self.log.call("all_gather", n_bytes, within)

    def _wait(self, index: int) -> None:
        handle = self.in_flight.get(index)
        if handle is None:
            return
        flat, arrives = self._flat(index), not handle.arrived and bool(handle.takes.arrived)
        super()._wait(index)
        if arrives:
            self._arrive(sorted(handle.parameters), flat)
        if not handle.waiting:
            self.log.release(flat)

    def _arrive(self, parameters: list[int], flat: Hashable) -> None:
        """Copy parameters out of a flat gather, or dequantize them."""
        together = not self._one_by_one(parameters)
        if self.sharing.width and together:
            n_bytes = _HALF * sum(self._piece(one).share * self._piece(one).ranks for one in parameters)
            self.log.request(flat, n_bytes, Kind.GATHER, "flat gather in fp16, out of 8 bits")
        for one in parameters:
            if self.sharing.width:
                self._restore(one)
            elif together:
                self.log.request(gathered(one), self.element * self.numel[one], Kind.GATHER, "gathered parameter")

    def _partition(self, index: int, *, saved: bool) -> None:
        in_graph, second = index in self.in_graph, self.second.get(index, 0)
        super()._partition(index, saved=saved)
        self.log.request("second partition", self.element * second, Kind.GATHER, "second partition of a parameter")
        if in_graph:
            self.log.rename(gathered(index), "in the graph")
        elif saved:
            self.log.rename(gathered(index), saved_key(index))
        else:
            self.log.release(gathered(index))

    def _let_go(self, index: int) -> None:
        super()._let_go(index)
        self.log.release(saved_key(index))


def gathered(index: int) -> Hashable:
    """Return the key of a gathered parameter."""
    return "gathered", index


def saved_key(index: int) -> Hashable:
    """Return the key of a released parameter that autograd has saved. It is freed with the operator that saved it."""
    return "saved", index


@lru_cache(maxsize=64)
def ends_of(steps: tuple[Step, ...]) -> tuple[tuple[Ends, Ends], ...]:
    """Return, for every module that begins at a step, what its end may release: in the forward, and in the backward."""
    found: list[tuple[Ends, Ends]] = []
    for at, step in enumerate(steps):
        forward, backward = list[tuple[int, Freed]](), list[tuple[int, Freed]]()
        for later in range(at, len(steps) if step.parameters else at):
            if steps[later].block != step.block:
                break
            ends = backward if steps[later].direction == BACKWARD else forward
            if not any(not freed.dropped for _, freed in ends):
                ends += [(later, freed) for freed in steps[later].frees if freed.name == step.name]
        found.append((tuple(forward), tuple(backward)))
    return tuple(found)
