"""The parameters that DeepSpeed's ZeRO-3 holds gathered at each step of a forward and backward pass.

The coordinator records in the second pass which modules run in which order. From the third pass on it prefetches, releases
parameters that are not needed soon, and keeps the rest. Only element counts decide, not the number of ranks or the batch. This
module replays the decisions step by step. Source: DeepSpeed 0.19.8, ``runtime/zero/partitioned_param_coordinator.py``.
"""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate, permutations, takewhile
from typing import NamedTuple

from zeroplan.engines.deepspeed.gathers import GatherMemory, Piece, Sharing, gather_memory
from zeroplan.engines.deepspeed.notes import Gathered, Note, Noted, Sent, Taking, per_gradient, per_module, sizes
from zeroplan.engines.deepspeed.order import BACKWARD, FORWARD, Freed, Step, trace
from zeroplan.engines.rows import Row, embedding_elements, has_tied_head
from zeroplan.numeric import ceil_div, round_up
from zeroplan.spec.recipe import DeepSpeedOptions

_NEVER = 10**18
_FEW = 4
"""The most parameters that a module owns itself, or a leaf module owns inside it, in any family."""


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


@lru_cache(maxsize=64)
def gathered(one: Pass) -> Gathered:
    """Return the gathered elements in one pass of the model, with one micro-batch per step.

    A first pass also gathers persistent parameters. It raises SpecError if DeepSpeed cannot quantize a module's shards.
    """
    if one.sharing.width:
        _FirstPass(one, persistent_missing=True).decide()
    return Replay(one).run() if one.trains else _with_forward_alone(one)


def _with_forward_alone(one: Pass) -> Gathered:
    """Return the gathered elements of a model that runs forwards only: the coordinator's trace ends with the head."""
    training = one._replace(trains=True)
    notes = Taking(one.whole.n_blocks)
    Replay(training, last_forward=True).note(notes)
    return replace(
        gathered(training), forward=tuple(notes.forward), before_experts=tuple(notes.before_experts), loss=notes.head_forward,
        head_gathering=notes.head_gathering, head_forward=notes.head_forward, norm_forward=notes.norm_forward,
    )  # fmt: skip


@lru_cache(maxsize=64)
def gathered_by_several(one: Pass) -> Gathered | None:
    """Return the same with several micro-batches per step; None if nothing differs.

    The coordinator decides once, in the first pass with a complete trace, which parameters to release where
    (``__params_to_release`` is cached). With several micro-batches that pass is the second of the first step, before the step
    has gathered the persistent parameters.
    """
    first = Replay(one, persistent_missing=True)
    first.decide()
    several = Replay(one, decided=first.decided, later=True).run()
    return None if several.is_like(gathered(one)) else several


class _Handle:
    """One all-gather: its parameters, the unused ones among them, and whether the coordinator has waited for it."""

    def __init__(self, parameters: tuple[int, ...], takes: GatherMemory) -> None:
        self.parameters = parameters
        self.waiting = set(parameters)
        self.takes = takes
        self.arrived = False


class _Sending:
    """The parameters gathered in one direction so far."""

    def __init__(self) -> None:
        self.sizes: Counter[int] = Counter()
        self.calls = 0
        self.scales = 0

    @property
    def in_all(self) -> Sent:
        return Sent(sizes(self.sizes), self.calls, self.scales)


class Replay:
    """The coordinator's state while it runs a complete trace."""

    def __init__(
        self, one: Pass, *, persistent_missing: bool = False, decided: set[tuple[int, int]] | None = None, later: bool = False,
        last_forward: bool = False,
    ) -> None:  # fmt: skip
        whole, options = one.whole, one.options
        fixed = _fixed(whole, one.recomputed, not options.memory_efficient_linear, last_forward)
        self.numel, self.frozen, self.uses, self.traversed = fixed.numel, fixed.frozen, fixed.uses, fixed.traversed
        self.profiled = whole.model.profile is not None
        self.tied_head = embedding_elements(whole) if self.profiled and has_tied_head(whole) else 0
        self.options = options
        self.n_blocks = whole.n_blocks
        self.steps = fixed.steps
        self.persistent = _persistent(self.numel, options)
        self.resident = frozenset() if persistent_missing else self.persistent
        self.decided = set() if decided is None else decided
        self.decides = decided is None
        self.sharing = one.sharing
        self.on_nvme = one.on_nvme
        self.read: set[int] = set()
        self.most_read, self.read_twice = 0, False
        self.starts = (*whole.starts, whole.n_elements)
        self.queue = deque(fixed.queue)
        self.fetched_for: dict[int, int] = {}
        self.available: set[int] = set()
        self.in_flight: dict[int, _Handle] = {}
        self.counted = 0
        self.saved: dict[int, int] = {}
        self.in_graph: set[int] = set()
        """Parameters whose gathered tensors the graph holds."""
        self.elements, self.second = self._second_partitions(left=later)
        self.peak = 0
        self.sent = {FORWARD: _Sending(), BACKWARD: _Sending()}

    def _second_partitions(self, *, left: bool) -> tuple[int, dict[int, int]]:
        """Return the elements of second partitions (hpZ) that exist from the start, and those still to be made, by parameter.

        A step's first micro-batch makes them; the later ones find them (``left``).
        """
        ways = self.options.zero_hpz_partition_size
        if ways == 1:
            return 0, {}
        each = {index: ceil_div(numel, ways) for index, numel in enumerate(self.numel)}
        return (sum(second for index, second in each.items() if index not in self.persistent), {}) if left else (0, each)

    def decide(self) -> None:
        """Run all steps and record only where parameters are released."""
        turned = False
        for at, step in enumerate(self.steps):
            turned = turned or step.direction == BACKWARD
            self._fetch(at, step, turned=turned)
            self._release(at, step)

    def run(self) -> Gathered:
        """Run all steps and return the gathered elements."""
        notes = Taking(self.n_blocks)
        self.note(notes)
        return self._gathered(notes)

    def note(self, notes: Taking) -> None:
        """Run all steps and note the gathered elements."""
        turned = False
        for at, step in enumerate(self.steps):
            if step.direction == BACKWARD and not turned:
                notes.loss, turned = self.elements, True
            gathering = self._fetch(at, step, turned=turned)
            self.in_graph.update(() if turned else step.in_graph)  # the graph of a recomputation goes with it
            during = self.elements
            handing = during - sum([self.saved.get(index, 0) for index in step.parameters])
            self._release(at, step)
            if turned:
                notes.in_backward(step, Note(step.made, gathering, during, self.elements, handing))
            else:
                notes.in_forward(step, gathering, during)

    def _gathered(self, notes: Taking) -> Gathered:
        backward, modules = self._of_blocks(notes.blocks)
        persistent = Counter(self.numel[index] for index in self.persistent)
        return Gathered(
            forward=tuple(notes.forward),
            before_experts=tuple(notes.before_experts),
            head_gathering=notes.head_gathering,
            head_forward=notes.head_forward,
            norm_forward=notes.norm_forward,
            loss=notes.loss,
            head=notes.head,
            past_head=notes.past_head,
            backward=backward,
            first=notes.first,
            below=tuple(notes.below),
            embedding=notes.embedding,
            end=self.elements,
            sent_forward=self.sent[FORWARD].in_all,
            sent_backward=self.sent[BACKWARD].in_all,
            persistent=sum(self.numel[index] for index in self.persistent),
            n_persistent=len(self.persistent),
            persistent_sent=sizes(persistent),
            most_read=self.most_read,
            read_twice=self.read_twice,
            modules=modules,
            head_notes=per_gradient(notes.after_blocks) if self.profiled else (),
            tied_head=self.tied_head,
        )

    def _of_blocks(
        self, blocks: list[list[Noted]]
    ) -> tuple[tuple[tuple[Note, ...], ...], tuple[tuple[tuple[str, Note], ...], ...]]:
        """Return the notes of each block by gradients; and by modules, if some weights are frozen."""
        if not any(self.frozen):
            return tuple(map(per_gradient, blocks)), ()
        making = ([(step, note) for step, note in block if not self._idle(step)] for block in blocks)
        return tuple(map(per_gradient, making)), tuple(map(per_module, blocks))

    def _idle(self, step: Step) -> bool:
        """Whether a module has parameters and makes no gradients."""
        return bool(step.parameters) and all(self.frozen[index] for index in step.parameters)

    def _fetch(self, at: int, step: Step, *, turned: bool) -> int:
        direction = BACKWARD if turned else FORWARD
        self.peak = self.elements
        if step.parameters:
            self._gather([index for index in step.parameters if self._missing(index)], direction)
            for index in self._costliest(step.parameters):
                self._wait(index)
            needed = {index for index in step.parameters if self.fetched_for.get(index, -1) < at}
            dropped: set[int] = set()
            while self.queue and len(dropped) < len(needed):
                index, used_at = self.queue.popleft()
                self.fetched_for[index] = used_at
                dropped.add(index)
        self._prefetch(direction)
        return self.peak

    def _missing(self, index: int) -> bool:
        return index not in self.available and index not in self.in_flight and index not in self.resident

    def _gather(self, indices: list[int], direction: str) -> None:
        if not indices:
            return
        numel = sum(self.numel[index] for index in indices)
        one_by_one = len(indices) == 1 or self.options.stage3_allgather_sequential
        takes = gather_memory(tuple(map(self._piece, sorted(indices))), self.sharing, one_by_one=one_by_one)
        if self.on_nvme:
            self._read(indices)
            self.read -= self.persistent  # persistent parameters are never released, so their buffers are free
        self.in_flight.update(dict.fromkeys(indices, _Handle(tuple(indices), takes)))
        self.counted += numel
        sent = self.sent[direction]
        for index in indices:
            sent.sizes[self.numel[index]] += 1
        sent.calls += len(indices) if one_by_one else 1
        sent.scales += takes.scales
        for change in takes.requested:
            self._hold(change)

    def _piece(self, index: int) -> Piece:
        """Return a parameter's gather: from all ranks, or within the group that has its second partition."""
        numel, ranks, group = self.numel[index], self.sharing.ranks or 1, self.options.zero_hpz_partition_size
        if group == 1 or index in self.second:
            return Piece(numel, ceil_div(numel, ranks), ranks)
        return Piece(numel, round_up(numel, ranks) // group, group)

    def _wait(self, index: int) -> None:
        """Copy all parameters of a gather out on first use. Its buffer is freed when the last of its parameters is used."""
        handle = self.in_flight.pop(index, None)
        if handle is None:
            return
        if not handle.arrived:
            handle.arrived = True
            self.available.update(handle.parameters)
            for change in handle.takes.arrived:
                self._hold(change)
        handle.waiting.discard(index)
        if not handle.waiting:
            self._hold(handle.takes.done)

    def _costliest(self, parameters: tuple[int, ...]) -> tuple[int, ...]:
        """Return the order of waits that takes most memory. DeepSpeed iterates over a set, so any order can occur."""
        handles = {id(self.in_flight[index]) for index in parameters if index in self.in_flight}
        if len(handles) < 2 or len(parameters) > _FEW:
            return parameters
        return max(permutations(parameters), key=self._most_of)

    def _most_of(self, order: tuple[int, ...]) -> int:
        held = most = 0
        waiting: dict[_Handle, set[int]] = {}
        for index in order:
            if (handle := self.in_flight.get(index)) is None:
                continue
            for change in () if handle.arrived or handle in waiting else handle.takes.arrived:
                held += change
                most = max(most, held)
            left = waiting[handle] = waiting.get(handle, handle.waiting) - {index}
            held += 0 if left else handle.takes.done
        return most

    def _prefetch(self, direction: str) -> None:
        bucket = 1 if self.options.stage3_allgather_sequential else self.options.stage3_prefetch_bucket_size
        limit = min(self.options.stage3_max_live_parameters - self.counted, bucket)
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
        self._gather(chosen, direction)
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

    def _release(self, at: int, step: Step) -> None:
        for freed in step.frees:
            self._free(at, freed, returning=step.direction == BACKWARD)

    def _free(self, at: int, freed: Freed, *, returning: bool) -> None:
        for index in freed.parameters:
            if self.decides and not freed.dropped and not self._stays(index, at + 1, leaf=freed.leaf):
                self.decided.add((at, index))
            goes = freed.dropped or (at, index) in self.decided
            if index not in self.persistent and index in self.available and goes:
                self._partition(index, saved=index in freed.saved)
        for index in freed.parameters if returning else ():
            self._let_go(index)

    def _partition(self, index: int, *, saved: bool) -> None:
        """Release a parameter. It stays alive if the graph holds it, or if autograd has ``saved`` a view of it."""
        self.available.discard(index)
        self.read.discard(index)
        self.counted -= self.numel[index]
        self._hold(self.second.pop(index, 0))
        if index in self.in_graph:
            self.in_graph.discard(index)  # the next gather of it is a new tensor
        elif saved:
            self.saved[index] = self.numel[index]
        else:
            self._hold(-self.numel[index])

    def _let_go(self, index: int) -> None:
        """Free a parameter that autograd had saved."""
        self._hold(-self.saved.pop(index, 0))

    def _stays(self, index: int, at: int, *, leaf: bool) -> bool:
        """Whether a prefetch wants the parameter, or it is reused before ``max_reuse_distance`` elements of other modules have run.

        The coordinator walks over the coming modules with or without inner ones, depending on whether the ended module is a
        leaf (``__params_to_release``): a leaf counts and finds nothing of its own, and after it a block counts both whole and
        piecewise.
        """
        if self.fetched_for.get(index, -1) > at:
            return True
        reach = self.options.stage3_max_reuse_distance
        if leaf:
            return self._within(index, at, reach)
        again = next((use for use in self.uses[index] if use >= at), _NEVER)
        return again != _NEVER and self.traversed[again] - self.traversed[at] < reach

    def _within(self, index: int, at: int, reach: int) -> bool:
        walked = 0
        for step in self.steps[at:]:
            low, high = step.inside
            if walked >= reach or low <= index < high:
                return walked < reach
            walked += self.starts[high] - self.starts[low]
        return False

    def _hold(self, elements: int) -> None:
        self.elements += elements
        self.peak = max(self.peak, self.elements)


class _FirstPass(Replay):
    """The first pass, which does not know the coming modules and so prefetches nothing."""

    def _prefetch(self, direction: str) -> None:
        pass


class _Fixed(NamedTuple):
    """What every pass of a model has in common."""

    steps: tuple[Step, ...]
    numel: tuple[int, ...]
    """Elements of each parameter."""
    frozen: tuple[bool, ...]
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
    frozen = tuple([each.parameter.frozen for each in whole.placed])
    return _Fixed(steps, numel, frozen, _uses(steps), (0, *accumulate(per_step)), queue)


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
