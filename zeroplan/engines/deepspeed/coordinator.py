"""The coordinator of DeepSpeed's ZeRO-3: which parameters it gathers, prefetches and releases as a model's modules run.

It records in the first pass which modules run in which order, and releases every parameter when its module ends. From the second
pass on it prefetches, releases parameters that are not needed soon, and keeps the rest. Only element counts decide, not the
batch. The same program requests memory from a count of elements (:mod:`zeroplan.engines.deepspeed.notes`) and from a log of
requests (:mod:`zeroplan.engines.requests.deepspeed_stage3`). Source: DeepSpeed 0.19.8,
``runtime/zero/partitioned_param_coordinator.py`` and ``partition_parameters.py``.
"""

from collections import Counter, deque
from collections.abc import Hashable, Iterator, Sequence
from functools import cache, lru_cache
from itertools import accumulate, permutations, takewhile
from typing import NamedTuple

from zeroplan.engines.collecting import Memory
from zeroplan.engines.deepspeed.gathers import HALF, Piece, Sharing, gather_in_8_bits
from zeroplan.engines.deepspeed.order import BACKWARD, FORWARD, Freed, Step, trace
from zeroplan.engines.rows import Row, Sizes
from zeroplan.ledger import Kind
from zeroplan.numeric import ceil_div, round_up
from zeroplan.spec.recipe import DeepSpeedOptions

_FEW = 4
"""The most parameters of which every order is tried. Only Qwen2-MoE's leaf modules own more."""
_RESTORED = "restored"
_GATHERED = "gathered parameter"
IN_GRAPH = "in the graph"
"""The key of gathered tensors that the graph holds."""
SECOND = "second partition"
"""The key of second partitions (hpZ)."""


class Pass(NamedTuple):
    """The inputs of the coordinator's decisions in a pass."""

    whole: Row
    options: DeepSpeedOptions
    recomputed: int
    """Number of blocks, from the first, that the backward recomputes."""
    sharing: Sharing
    on_nvme: frozenset[int]
    """Parameters that have to be read from NVMe before a prefetch can gather them."""
    trains: bool = True
    """Backward passes follow. Without them nothing is reused, so each module's parameters are released after it."""


class Change(NamedTuple):
    """A request of memory under a key; of a negative size, its release. [bytes]"""

    key: Hashable
    n_bytes: int
    reason: str = ""


class _Handle:
    """One all-gather, which is also the key of its flat buffer: its parameters, and the unused ones among them."""

    def __init__(self, parameters: tuple[int, ...], *, together: bool) -> None:
        """``together``: the parameters are gathered flat and copied out on first use; else each is gathered in place."""
        self.parameters, self.waiting, self.together = tuple(sorted(parameters)), set(parameters), together
        self.arrived = False
        """Whether the coordinator has waited for it."""


class Sent:
    """The all-gathers of one direction of a pass: parameters by size, number of calls, and all ranks' scales for 8 bits."""

    def __init__(self) -> None:
        self.counted: Counter[int] = Counter()
        self.calls = self.scales = 0

    @property
    def sizes(self) -> Sizes:
        """Elements of a parameter, and the number of parameters of that size, the smallest first."""
        return tuple(sorted(self.counted.items()))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sent) and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]  # it changes while a pass runs


class Coordinator:
    """The coordinator in one pass. The key of a gathered parameter is its index in the row (:func:`gathered_key`)."""

    def __init__(
        self, one: Pass, memory: Memory, *, element: int, ranks: int = 0, stream: int = 0, recording: bool = False,
        resident: bool = True, decided: set[tuple[int, int]] | None = None, later: bool = False, last_forward: bool = False,
    ) -> None:  # fmt: skip
        """``ranks``: 0 leaves out the padding of gathered parameters; ``recording``: the first pass, which prefetches nothing.

        ``resident``: persistent parameters exist; ``decided``: the releases that an earlier pass decided; ``later``: a pass of the
        same step came before; ``last_forward``: no backward follows.
        """
        whole, self.options = one.whole, one.options
        fixed = _fixed(whole, one.recomputed, not self.options.memory_efficient_linear, last_forward)
        self.steps, self.numel, self.uses, self.traversed = fixed.steps, fixed.numel, fixed.uses, fixed.traversed
        self.memory, self.element, self.ranks, self.stream = memory, element, ranks, stream
        self.persistent = _persistent(self.numel, self.options)
        self.resident = self.persistent if resident else frozenset()
        self.recording, self.decided = recording, set() if decided is None else decided
        self.decides = decided is None and not recording
        self.sharing, self.on_nvme = one.sharing, one.on_nvme
        self.alone = ranks == 1 and not self.sharing.copied
        """A single rank's shards are whole parameters on the GPU, so a gather allocates nothing."""
        self.read: set[int] = set()
        self.most_read, self.read_twice = 0, False
        self.starts = (*whole.starts, whole.n_elements)
        self.bucket = 1 if self.options.stage3_allgather_sequential else self.options.stage3_prefetch_bucket_size
        """Elements that it gathers ahead at most."""
        self.room: list[int] = []
        """The live parameters that it could still gather at each prefetch; equal blocks are compared by it. [elements]"""
        self.queue = deque(fixed.queue)
        self.fetched_for: dict[int, int] = {}
        self.available: set[int] = set()
        self.in_flight: dict[int, _Handle] = {}
        self.counted = 0
        self.in_graph: set[int] = set()
        """Parameters whose gathered tensors the graph holds."""
        self.in_backward = False
        """The backward has begun."""
        self.sent = {FORWARD: Sent(), BACKWARD: Sent()}
        ways = self.options.zero_hpz_partition_size
        self.second = {} if ways == 1 or later else {index: ceil_div(size, ways) for index, size in enumerate(self.numel)}
        """Elements of second partitions (hpZ) still to be made, by parameter. A step's first micro-batch makes them."""

    # --- modules ------------------------------------------------------------------------------------------------------------

    def begin(self, at: int) -> None:
        """Begin a module: gather its parameters and prefetch the next ones."""
        step, memory = self.steps[at], self.memory
        self.in_backward = self.in_backward or step.direction == BACKWARD
        memory.stream = self.stream
        if step.parameters:
            self._fetch(at, step.parameters)
        self._prefetch()
        memory.stream = 0
        self.in_graph.update(() if self.in_backward else step.in_graph)  # a recomputed block's graph is freed with it

    def free(self, at: int, freed: Freed) -> None:
        """End a module that began at a step: release parameters that are not needed soon."""
        for index in freed.parameters:
            if self.decides and not freed.dropped and not self._stays(index, at + 1, leaf=freed.leaf):
                self.decided.add((at, index))
            stays = index in self.persistent or not (freed.dropped or (at, index) in self.decided)
            while_recording = self.recording and not (freed.dropped and index in self.persistent)
            if index in self.available and (while_recording or not stays):
                self._partition(index, saved=index in freed.saved)
        if self.steps[at].direction == BACKWARD:
            self.memory.release(*map(saved_key, freed.parameters))

    def end_pass(self) -> None:
        """Release what remains (``release_backward_leftovers``): parameters of modules whose end no hook sees."""
        for index in sorted(self.available - (frozenset() if self.recording else self.persistent)):
            self._partition(index, saved=False)

    # --- gathers ------------------------------------------------------------------------------------------------------------

    def _fetch(self, at: int, parameters: tuple[int, ...]) -> None:
        if missing := [index for index in parameters if self._missing(index)]:
            self._gather(missing)
        for index in self._costliest(parameters):
            self._wait(index)
        needed = {index for index in parameters if self.fetched_for.get(index, -1) < at}
        dropped: set[int] = set()
        while self.queue and len(dropped) < len(needed):
            index, used_at = self.queue.popleft()
            self.fetched_for[index] = used_at
            dropped.add(index)

    def _missing(self, index: int) -> bool:
        return index not in self.available and index not in self.in_flight and index not in self.resident

    def _gather(self, indices: list[int]) -> None:
        sequential, sharing = self.options.stage3_allgather_sequential, self.sharing
        alone = self.ranks == 1 or (sharing.copied and sharing.ranks == 1)
        handle = _Handle(tuple(indices), together=len(indices) > 1 and not sequential and not alone)
        if self.on_nvme:
            self._read(indices)
            self.read -= self.persistent  # persistent parameters are never released, so their buffers are free
        self.in_flight.update(dict.fromkeys(indices, handle))
        self.counted += sum(self.numel[index] for index in indices)
        sent = self.sent[BACKWARD if self.in_backward else FORWARD]
        for index in indices:
            sent.counted[self.numel[index]] += 1
        sent.calls += len(indices) if sequential else 1
        if sharing.width:
            pieces = tuple(map(self._piece, handle.parameters))
            sent.scales += gather_in_8_bits(self.memory, handle, pieces, sharing, together=handle.together)
        elif handle.together:
            self._call(handle.parameters)
            n_bytes = self.element * sum(map(self._padded, indices))
            self.memory.request(handle, n_bytes, Kind.GATHER, "flat all-gather of several parameters")
            self._copy_shares(indices)
        else:
            self._gather_in_place(handle.parameters)

    def _gather_in_place(self, indices: tuple[int, ...]) -> None:
        for index in indices:
            self._call((index,))
            if not self.alone:
                self.memory.request(gathered_key(index), self.element * self._padded(index), Kind.GATHER, _GATHERED)
            self._copy_shares([index])

    def _padded(self, index: int) -> int:
        return round_up(self.numel[index], self.ranks) if self.ranks else self.numel[index]

    def _call(self, indices: tuple[int, ...]) -> None:
        if self.ranks > 1:
            second = self.options.zero_hpz_partition_size
            within = self.ranks if second == 1 or indices[0] in self.second else second
            self.memory.call("all_gather", self.element * sum(map(self._padded, indices)), within)

    def _copy_shares(self, indices: list[int]) -> None:
        """Copy this rank's shards to the GPU, if they are in host memory. A single rank's copy is the parameter itself."""
        if self.sharing.copied and self.sharing.ranks > 1:
            for index in indices:
                n_bytes = self.element * ceil_div(self.numel[index], self.sharing.ranks)
                self.memory.request("copy of shares", n_bytes, Kind.GATHER, "copy of this rank's share")
            self.memory.release("copy of shares")

    def _piece(self, index: int) -> Piece:
        """Return a parameter's gather: from all ranks, or within the group that has its second partition."""
        numel, ranks, group = self.numel[index], self.sharing.ranks or 1, self.options.zero_hpz_partition_size
        if group == 1 or index in self.second:
            return Piece(ceil_div(numel, ranks), ranks)
        return Piece(round_up(numel, ranks) // group, group)

    def _wait(self, index: int) -> None:
        """Copy all parameters of a gather out on first use. Its buffer is freed when the last of its parameters is used."""
        handle = self.in_flight.pop(index, None)
        if handle is None:
            return
        if not handle.arrived:
            handle.arrived = True
            self.available.update(handle.parameters)
            for key, n_bytes, reason in self._arriving(handle):
                if n_bytes > 0:
                    self.memory.request(key, n_bytes, Kind.GATHER, reason)
                else:
                    self.memory.release(key)
        handle.waiting.discard(index)
        if not handle.waiting:
            self.memory.release(handle)

    def _arriving(self, handle: _Handle) -> Iterator[Change]:
        """Yield the changes while parameters are copied out of a flat gather, or dequantized to fp16 and cast to their dtype."""
        in_8_bits = self.sharing.width > 0
        if in_8_bits and handle.together:
            payload = sum(self._piece(index).whole for index in handle.parameters)
            yield Change(handle, HALF * payload, "flat gather in fp16, out of 8 bits")
        casts = in_8_bits and not self.sharing.half
        for index in handle.parameters if in_8_bits or handle.together else ():
            if casts:
                yield Change(_RESTORED, HALF * self.numel[index], "parameter in fp16, out of 8 bits")
            yield Change(gathered_key(index), self.element * self.numel[index], _GATHERED)
            if casts:
                yield Change(_RESTORED, -HALF * self.numel[index])

    def _costliest(self, parameters: tuple[int, ...]) -> tuple[int, ...]:
        """Return the order of waits that takes most memory. DeepSpeed iterates over a set, so any order can occur."""
        handles = {self.in_flight[index] for index in parameters if index in self.in_flight}
        if len(handles) < 2:
            return parameters
        if len(parameters) > _FEW:
            return self._one_of_each_first(parameters)
        changes = {handle: () if handle.arrived else tuple(self._arriving(handle)) for handle in handles}
        return max(permutations(parameters), key=lambda order: self._most_of(order, changes))

    def _one_of_each_first(self, parameters: tuple[int, ...]) -> tuple[int, ...]:
        """Return an order in which every gather has arrived before the flat buffer of one with several parameters is freed."""
        waiting: dict[_Handle | None, list[int]] = {}
        for index in parameters:
            waiting.setdefault(self.in_flight.get(index), []).append(index)
        groups = sorted(waiting.values(), key=len, reverse=True)
        return (*(group[0] for group in groups), *(index for group in groups for index in group[1:]))

    def _most_of(self, order: tuple[int, ...], changes: dict[_Handle, tuple[Change, ...]]) -> int:
        held = most = 0
        waiting: dict[_Handle, set[int]] = {}
        for index in order:
            if (handle := self.in_flight.get(index)) is None:
                continue
            for change in changes[handle] if handle not in waiting else ():
                held += change.n_bytes
                most = max(most, held)
            left = waiting[handle] = waiting.get(handle, handle.waiting) - {index}
            if not left:
                flat = sum(change.n_bytes for change in changes[handle] if change.key is handle)
                held -= self.memory.bytes_of(handle) + flat
        return most

    def _prefetch(self) -> None:
        if self.recording:
            return
        bucket, room = self.bucket, self.options.stage3_max_live_parameters - self.counted
        self.room.append(room)
        limit = min(room, bucket)
        chosen: list[int] = []
        numel = 0
        while bucket and self.queue and numel < limit:
            index, used_at = self.queue[0]
            if index in self.on_nvme and index not in self.read:
                break
            self.queue.popleft()
            self.fetched_for[index] = max(self.fetched_for.get(index, -1), used_at)
            if self._missing(index) and index not in chosen:
                chosen.append(index)
                numel += self.numel[index]
        if chosen:
            self._gather(chosen)
        if bucket and self.on_nvme:
            self._read_ahead()

    def _read_ahead(self) -> None:
        """Read the next parameters from NVMe, as far as there are buffers (``__prefetch_nvme_param_partitions``)."""
        enough = 2 * sum(self.numel[index] for index in self.in_flight)
        chosen, considered = list[int](), 0
        for index, _ in self.queue:
            if considered > enough or len(self.read) + len(chosen) >= self.options.offload_param_buffer_count:
                break
            if index in self.on_nvme and index not in self.read:
                self.read_twice = self.read_twice or index in chosen
                chosen.append(index)
            considered += self.numel[index]
        self._read(chosen)

    def _read(self, indices: list[int]) -> None:
        """Give each parameter from NVMe a buffer until it is released."""
        self.read.update(index for index in indices if index in self.on_nvme)
        self.most_read = max(self.most_read, len(self.read))

    # --- releases -----------------------------------------------------------------------------------------------------------

    def _partition(self, index: int, *, saved: bool) -> None:
        """Release a parameter. It stays alive if the graph holds it, or if autograd has ``saved`` a view of it."""
        memory, key = self.memory, gathered_key(index)
        self.available.discard(index)
        self.read.discard(index)
        self.counted -= self.numel[index]
        if self.second:
            memory.request(SECOND, self.element * self.second.pop(index, 0), Kind.GATHER, "second partition of a parameter")
        if index in self.in_graph:
            self.in_graph.discard(index)  # the next gather of it is a new tensor
            memory.rename(key, IN_GRAPH)
        elif saved:
            memory.rename(key, saved_key(index))
        else:
            memory.release(key)

    def _stays(self, index: int, at: int, *, leaf: bool) -> bool:
        """Whether a prefetch wants the parameter, or it is reused before ``max_reuse_distance`` elements of other modules have run.

        The coordinator walks over the coming modules with or without inner ones, depending on whether the ended module is a
        leaf (``__params_to_release``): a leaf counts and finds nothing of its own, and after it a block counts both whole and
        piecewise.
        """
        if self.fetched_for.get(index, -1) > at:
            return True
        if leaf:
            return self._within(index, at, self.options.stage3_max_reuse_distance)
        return not self.is_far(index, at)

    def is_far(self, index: int, at: int) -> bool:
        """Whether a parameter is used next after ``max_reuse_distance`` elements of other modules from a step on, or never."""
        again = next((use for use in self.uses[index] if use >= at), None)
        return again is None or self.traversed[again] - self.traversed[at] >= self.options.stage3_max_reuse_distance

    def _within(self, index: int, at: int, reach: int) -> bool:
        walked = 0
        for step in self.steps[at:]:
            low, high = step.inside
            if walked >= reach or low <= index < high:
                return walked < reach
            walked += self.starts[high] - self.starts[low]
        return False


@cache
def gathered_key(index: int) -> Hashable:
    """Return the key of a gathered parameter."""
    return "gathered", index


@cache
def saved_key(index: int) -> Hashable:
    """Return the key of a released parameter that autograd has saved. It is freed with the operator that saved it."""
    return "saved", index


class _Fixed(NamedTuple):
    """What every pass of a model has in common."""

    steps: tuple[Step, ...]
    numel: tuple[int, ...]
    """Elements of each parameter."""
    uses: dict[int, list[int]]
    """By parameter: the steps that use it."""
    traversed: tuple[int, ...]
    """Elements of the parameters of all modules before each step."""
    queue: tuple[tuple[int, int], ...]
    """Each parameter that a step uses, and the step, in the order of the trace."""


@lru_cache(maxsize=64)
def _fixed(whole: Row, recomputed: int, linears_of_torch: bool, forward_alone: bool) -> _Fixed:  # noqa: FBT001  a key
    steps = trace(whole, recomputed=recomputed, linears_of_torch=linears_of_torch)
    steps = _forward_alone(steps) if forward_alone else steps
    numel = tuple([each.end - each.start for each in whole.placed])
    per_step = [0 if step.leaf else sum([numel[index] for index in step.parameters]) for step in steps]
    queue = tuple([(index, at) for at, step in enumerate(steps) for index in sorted(step.parameters)])
    return _Fixed(steps, numel, _uses(steps), (0, *accumulate(per_step)), queue)


def _forward_alone(steps: tuple[Step, ...]) -> tuple[Step, ...]:
    """Return the steps of a forward without a backward, in which autograd saves nothing."""
    return tuple(
        step._replace(in_graph=(), frees=tuple(freed._replace(saved=()) for freed in step.frees))
        for step in takewhile(lambda step: step.direction == FORWARD, steps)
    )


def _uses(steps: tuple[Step, ...]) -> dict[int, list[int]]:
    uses: dict[int, list[int]] = {}
    for at, step in enumerate(steps):
        for index in step.parameters:
            uses.setdefault(index, []).append(at)
    return uses


def _persistent(numels: Sequence[int], options: DeepSpeedOptions) -> frozenset[int]:
    """Return the parameters small enough to stay gathered. Source: ``parameter_offload.py``, ``mark_persistent_parameters``."""
    total = 0
    kept: list[int] = []
    for index, numel in enumerate(numels):
        small = numel <= options.stage3_param_persistence_threshold
        if small and numel + total <= options.stage3_model_persistence_threshold:
            kept.append(index)
            total += numel
    return frozenset(kept)
