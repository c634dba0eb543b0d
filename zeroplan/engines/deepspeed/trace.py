"""Which parameters does DeepSpeed's ZeRO-3 hold gathered at each step of a forward and backward pass?

The coordinator records in the second pass which modules run in which order and, from the third on, gathers ahead, releases what
is not needed soon, and keeps the rest: decisions by element counts alone, so they depend neither on the number of ranks nor on
the batch. They are replayed here, step by step. Source: DeepSpeed 0.19.8, ``runtime/zero/partitioned_param_coordinator.py``.
"""

from collections import deque
from dataclasses import astuple, dataclass
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from zeroplan.engines.deepspeed.flat import Placed, Row, in_order
from zeroplan.spec.adapter import ATTENTION, AdapterSpec
from zeroplan.spec.model import ModelSpec
from zeroplan.spec.recipe import DeepSpeedOptions, Recompute

_FORWARD, _BACKWARD = "forward", "backward"
_NEVER = 10**18
AGAIN = -1
"""Stands for the gradients made, in the note of a frozen block that is recomputed."""

#: Families whose expert layer DeepSpeed gathers and releases as one module, router and all (``leaf_module_config.py``).
LEAF_FAMILIES = ("mixtral", "qwen3_moe")


class Step(NamedTuple):
    """One module that starts, forward or backward, and the parameters it owns (their places in the row)."""

    direction: str
    parameters: tuple[int, ...]
    block: int
    made: int
    """Elements of the block's gradients made when it is done; in the forward 0."""
    releases: bool
    """Whether its end is noticed, so that its parameters can be released."""
    saves: bool = False
    """Autograd saves a weight of it as it is gathered, so that it lives on when it is released, until the backward.

    Checkpointing does that to what it recomputes, frozen weights apart; so does an operator other than ``linear`` that takes a view
    of the weight, as the grouped multiplication of experts does (DeepSpeed replaces ``linear`` to save the parameter instead).
    """
    drops: tuple[int, ...] = ()
    """Frozen parameters of the recomputation that its backward has begun: DeepSpeed releases them with it, whoever needs them.

    They are gathered again for their own backward.
    """


class Note(NamedTuple):
    """Elements held around one module's backward."""

    made: int
    """Elements of the block's gradients made when it is done."""
    gathering: int
    """Most while its parameters are gathered."""
    during: int
    after: int
    frozen: int = 0
    """Most while the parameters of frozen modules are gathered that go backward next, before another gradient is made."""


@dataclass(frozen=True, eq=False, slots=True)
class Gathered:
    """Elements gathered in the course of one pass, copies and all; one object per model and options."""

    forward: tuple[int, ...]
    """Most during the forward of each block."""
    head_forward: int
    loss: int
    head: tuple[int, ...]
    """In the backward: at the loss, the head, the final norm."""
    backward: tuple[tuple[Note, ...], ...]
    """Of each block, in the order of its gradients."""
    embedding: int
    end: int
    """Most while the embedding is gathered for its backward, and from then on."""
    forward_elements: int
    backward_elements: int
    """Elements all-gathered in each direction."""
    forward_calls: int
    backward_calls: int
    persistent: int
    n_persistent: int
    """Elements and number of the parameters that are never released between steps."""


@lru_cache(maxsize=64)
def gathered(whole: Row, options: DeepSpeedOptions, recompute: Recompute) -> tuple[Gathered, ...]:
    """Replay one pass of the model: with one micro-batch per step, and with several where that differs.

    The coordinator decides once, in the first pass with a complete trace, which parameters to release where
    (``__params_to_release`` is cached), and abides by it. With several micro-batches that pass is the second of the first
    step, before the first step has gathered the persistent parameters.
    """
    steps = trace(whole, again=recompute == "full")
    single = _Replay(whole, options, steps).run()
    first = _Replay(whole, options, steps, persistent_missing=True)
    first.run()
    several = _Replay(whole, options, steps, decided=first.decided).run()
    return (single,) if astuple(single) == astuple(several) else (single, several)


class _Module(NamedTuple):
    parameters: tuple[int, ...]
    viewed: bool = False
    """Its operators save views of its weights."""
    reads_constant: bool = False
    """Nothing before it in its block is trained, nor is it."""


@lru_cache(maxsize=64)
def trace(whole: Row, *, again: bool) -> tuple[Step, ...]:
    """Modules in the order in which they run; with ``again``, each block is recomputed in its backward."""
    model, placed, n_blocks = whole.model, whole.placed, whole.n_blocks
    before = [index for index, each in enumerate(placed) if each.block < 0]
    after = [index for index, each in enumerate(placed) if each.block == n_blocks]
    head_of = before[:1] if model.tie_word_embeddings else after[-1:]
    norm = tuple(after if model.tie_word_embeddings else after[:-1])
    blocks = [_modules(model, placed, block) for block in range(n_blocks)]
    steps = [Step(_FORWARD, (), -1, 0, releases=True)] * 2
    steps += [Step(_FORWARD, (index,), -1, 0, releases=True) for index in before]
    steps.append(Step(_FORWARD, (), -1, 0, releases=True))
    for block, modules in enumerate(blocks):
        viewed = [step._replace(saves=module.viewed) for step, module in zip(_forward(modules, block), modules, strict=True)]
        steps += [Step(_FORWARD, (), block, 0, releases=True), *(_forward(modules, block) if again else viewed)]
    steps += [Step(_FORWARD, norm, n_blocks, 0, releases=True), Step(_FORWARD, tuple(head_of), n_blocks, 0, releases=True)]
    steps += [Step(_BACKWARD, (), n_blocks, 0, releases=True), Step(_BACKWARD, tuple(head_of), n_blocks, 1, releases=True)]
    steps += [Step(_BACKWARD, (), n_blocks, 1, releases=True), Step(_BACKWARD, norm, n_blocks, 2, releases=True)]
    for block in range(n_blocks - 1, -1, -1):
        steps += _backward(placed, _followed(blocks[block], model, block, again=again), block, again=again)
    if model.adapter is None or again:
        steps += [Step(_BACKWARD, (index,), -1, 0, releases=False) for index in reversed(before)]
    return tuple(steps)


def _forward(modules: tuple[_Module, ...], block: int) -> list[Step]:
    return [Step(_FORWARD, module.parameters, block, 0, releases=True) for module in modules]


def _backward(placed: tuple[Placed, ...], modules: tuple[_Module, ...], block: int, *, again: bool) -> list[Step]:
    """Return a block's modules in reverse; the last one is waiting in its backward while the block is recomputed."""
    steps: list[Step] = [Step(_BACKWARD, (), block, 0, releases=True)] * 2
    made = 0
    recompute = [step._replace(saves=True) for step in _forward(modules, block)] if again else []
    for module in reversed(modules):
        made += sum(
            placed[index].end - placed[index].start for index in module.parameters if not placed[index].parameter.frozen
        )
        steps.append(Step(_BACKWARD, module.parameters, block, made, releases=True))
        if module.parameters and recompute:
            steps[-1] = steps[-1]._replace(releases=False)
            dropped = tuple(index for step in recompute[:-1] for index in step.parameters if placed[index].parameter.frozen)
            steps += [*recompute[:-1], Step(_BACKWARD, module.parameters, block, made, releases=True, drops=dropped)]
            recompute = []
    return steps


def _followed(modules: tuple[_Module, ...], model: ModelSpec, block: int, *, again: bool) -> tuple[_Module, ...]:
    """What has a backward: in the first block, whose input has no gradient, nothing that comes before all adapters."""
    if model.adapter is None or again or block:
        return modules
    return tuple(module for module in modules if not module.reads_constant)


def _modules(model: ModelSpec, placed: tuple[Placed, ...], block: int) -> tuple[_Module, ...]:
    """Return the modules of a block in the order in which they run forward, those without parameters too."""
    by_name: dict[str, list[int]] = {}
    inside = [(index, each.parameter.name.rpartition(".")[0]) for index, each in enumerate(placed) if each.block == block]
    leaf = model.family in LEAF_FAMILIES and any(name.endswith("experts") for _, name in inside)
    for index, name in inside:
        by_name.setdefault("mlp" if leaf and name.startswith("mlp.") else name, []).append(index)
    names = in_order(list(by_name))
    if model.adapter is not None:
        return _adapted_modules(by_name, names, model.adapter)
    modules: list[_Module] = []
    parent = ""
    for name in names:
        if "." in name and name.rpartition(".")[0] != parent:
            parent = name.rpartition(".")[0]
            modules.append(_Module(()))
        modules.append(_Module(tuple(by_name[name]), viewed=(leaf and name == "mlp") or name.endswith("experts")))
        modules += [_Module(())] * _modules_after(model, name)
    return tuple(modules)


def _adapted_modules(by_name: dict[str, list[int]], names: list[str], adapter: AdapterSpec) -> tuple[_Module, ...]:
    """The same with adapters: a wrapper without parameters runs the linear layer, an empty dropout and the two matrices."""
    modules: list[_Module] = []
    parent = ""
    constant = _before_adapters(adapter)
    for name in names:
        parts = name.split(".")
        if len(parts) > 1 and parts[0] != parent:
            parent = parts[0]
            modules.append(_Module(()))
        wrapped = parts[-1] == "base_layer"
        modules += [_Module(())] * wrapped
        modules.append(_Module(tuple(by_name[name]), reads_constant=name.removesuffix(".base_layer") in constant))
        modules += [_Module(())] * wrapped
        modules += [_Module(())] * (parts[1:2] == ["gate_proj"] and name in _ENDS_GATE)
    return tuple(modules)


#: Module after which the activation of the gate runs.
_ENDS_GATE = ("mlp.gate_proj", "mlp.gate_proj.lora_B.default")


def _before_adapters(adapter: AdapterSpec) -> frozenset[str]:
    """Modules of a block, by name, that read nothing an adapter has made."""
    names = ["input_layernorm", *(f"self_attn.{name}" for name in ATTENTION[:3])]
    if not set(adapter.layers) & set(ATTENTION[:3]):
        names += ["self_attn.q_norm", "self_attn.k_norm", "self_attn.o_proj"]
    if not set(adapter.layers) & set(ATTENTION):
        names += ["post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj"]
    if adapter.layers == ("down_proj",):
        names.append("mlp.down_proj")
    return frozenset(names)


def _modules_after(model: ModelSpec, name: str) -> int:
    """Modules without parameters that run right after one: activations, and GPT-2's dropouts."""
    leaf = name.rpartition(".")[2]
    if leaf in ("gate_proj", "gate_up_proj", "c_fc", "dense_h_to_4h", "fc1"):
        return 1
    return int(leaf == "c_proj" and model.family == "gpt2")


class _Handle:
    """One all-gather: its parameters, those not yet used, and whether it has been waited for."""

    def __init__(self, parameters: tuple[int, ...], *, in_place: bool) -> None:
        self.parameters = parameters
        self.waiting = set(parameters)
        self.in_place = in_place
        self.arrived = False


class _Replay:
    """The coordinator's state while a complete trace is run."""

    def __init__(
        self,
        whole: Row,
        options: DeepSpeedOptions,
        steps: tuple[Step, ...],
        *,
        persistent_missing: bool = False,
        decided: set[tuple[int, int]] | None = None,
    ) -> None:
        self.numel = [each.end - each.start for each in whole.placed]
        self.frozen = [each.parameter.frozen for each in whole.placed]
        self.options = options
        self.n_blocks = whole.n_blocks
        self.steps = steps
        self.persistent = _persistent(self.numel, options)
        self.resident = frozenset() if persistent_missing else self.persistent
        self.decided = set() if decided is None else decided
        self.decides = decided is None
        self.uses = _uses(steps)
        per_step = (sum(self.numel[index] for index in step.parameters) for step in steps)
        self.traversed = (0, *accumulate(per_step))
        self.queue = deque((index, at) for at, step in enumerate(steps) for index in sorted(step.parameters))
        self.fetched_for: dict[int, int] = {}
        self.available: set[int] = set()
        self.in_flight: dict[int, _Handle] = {}
        self.counted = 0
        self.saved: dict[int, int] = {}
        self.elements = 0
        self.peak = 0
        self.sent = {_FORWARD: 0, _BACKWARD: 0}
        self.calls = {_FORWARD: 0, _BACKWARD: 0}

    def run(self) -> Gathered:
        """Go through all steps and note what is held."""
        forward, head = [0] * self.n_blocks, list[int]()
        backward: dict[int, list[Note]] = {block: [] for block in range(self.n_blocks)}
        head_forward, loss, embedding, turned = 0, 0, 0, False
        for at, step in enumerate(self.steps):
            if step.direction == _BACKWARD and not turned:
                loss, turned = self.elements, True
            gathering = self._fetch(at, step, turned=turned)
            during = self.elements
            if step.releases:
                self._release(at, step)
            if not turned and 0 <= step.block < self.n_blocks:
                forward[step.block] = max(forward[step.block], gathering)
            elif not turned and step.block == self.n_blocks:
                head_forward = max(head_forward, gathering)
            elif turned and step.block == self.n_blocks:
                head.append(gathering)
            elif turned and step.block >= 0:
                again = any(self.frozen) and step.direction == _FORWARD
                idle = bool(step.parameters) and all(self.frozen[index] for index in step.parameters)
                made, frozen = AGAIN if again else step.made, gathering if idle and not again else 0
                backward[step.block].append(Note(made, gathering, during, self.elements, frozen))
            elif turned:
                embedding = max(embedding, gathering)
        notes = tuple(_per_gradient(backward[block]) for block in range(self.n_blocks))
        return Gathered(
            tuple(forward), head_forward, loss, (head[0], head[1], max(head[2:])), notes, embedding, self.elements,
            self.sent[_FORWARD], self.sent[_BACKWARD], self.calls[_FORWARD], self.calls[_BACKWARD],
            sum(self.numel[index] for index in self.persistent), len(self.persistent),
        )  # fmt: skip

    def _fetch(self, at: int, step: Step, *, turned: bool) -> int:
        direction = _BACKWARD if turned else _FORWARD
        self.peak = self.elements
        self._gather([index for index in step.parameters if self._missing(index)], direction)
        for index in step.parameters:
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
        in_place = len(indices) == 1 or self.options.stage3_allgather_sequential
        handle = _Handle(tuple(indices), in_place=in_place)
        self.in_flight.update(dict.fromkeys(indices, handle))
        self.counted += numel
        self.sent[direction] += numel
        self.calls[direction] += len(indices) if in_place else 1
        self._hold(numel)

    def _wait(self, index: int) -> None:
        """Copy everything of a flat gather out on first use; the flat tensor goes with its last parameter's use."""
        handle = self.in_flight.pop(index, None)
        if handle is None:
            return
        if not handle.arrived:
            handle.arrived = True
            self.available.update(handle.parameters)
            self._hold(0 if handle.in_place else sum(self.numel[each] for each in handle.parameters))
        handle.waiting.discard(index)
        if not handle.waiting and not handle.in_place:
            self._hold(-sum(self.numel[each] for each in handle.parameters))

    def _prefetch(self, direction: str) -> None:
        bucket = 1 if self.options.stage3_allgather_sequential else self.options.stage3_prefetch_bucket_size
        limit = min(self.options.stage3_max_live_parameters - self.counted, bucket)
        chosen: list[int] = []
        numel = 0
        while bucket and self.queue and numel < limit:
            index, used_at = self.queue.popleft()
            self.fetched_for[index] = max(self.fetched_for.get(index, -1), used_at)
            if self._missing(index) and index not in chosen:
                chosen.append(index)
                numel += self.numel[index]
        self._gather(chosen, direction)

    def _release(self, at: int, step: Step) -> None:
        for index in step.parameters:
            if self.decides and not (self.fetched_for.get(index, -1) > at + 1 or self._is_used_soon(index, at + 1)):
                self.decided.add((at, index))
            if index in self.persistent or index not in self.available or (at, index) not in self.decided:
                continue
            self.available.discard(index)
            self.counted -= self.numel[index]
            if step.saves and not self.frozen[index]:
                self.saved[index] = self.numel[index]
            else:
                self._hold(-self.numel[index])
        for index in step.drops:
            if index in self.available and index not in self.persistent:
                self.available.discard(index)
                self.counted -= self.numel[index]
                self._hold(-self.numel[index])
        if step.direction == _BACKWARD:
            self._hold(-sum(self.saved.pop(index, 0) for index in step.parameters))

    def _is_used_soon(self, index: int, at: int) -> bool:
        """Whether it is used again before ``max_reuse_distance`` elements of other modules have run."""
        again = next((use for use in self.uses[index] if use >= at), _NEVER)
        reach = self.options.stage3_max_reuse_distance
        return again != _NEVER and self.traversed[again] - self.traversed[at] < reach

    def _hold(self, elements: int) -> None:
        self.elements += elements
        self.peak = max(self.peak, self.elements)


def _uses(steps: tuple[Step, ...]) -> dict[int, list[int]]:
    uses: dict[int, list[int]] = {}
    for at, step in enumerate(steps):
        for index in step.parameters:
            uses.setdefault(index, []).append(at)
    return uses


def _persistent(numels: list[int], options: DeepSpeedOptions) -> frozenset[int]:
    """Parameters small enough never to be partitioned. Source: ``parameter_offload.py``, ``mark_persistent_parameters``."""
    total = 0
    kept: list[int] = []
    for index, numel in enumerate(numels):
        small = numel <= options.stage3_param_persistence_threshold
        if small and numel + total <= options.stage3_model_persistence_threshold:
            kept.append(index)
            total += numel
    return frozenset(kept)


def _per_gradient(notes: list[Note]) -> tuple[Note, ...]:
    """Merge the notes of modules that make no gradient into one per number of gradients made."""
    merged: dict[int, Note] = {}
    for note in notes:
        before = merged.get(note.made, note)
        if note.frozen:
            merged[note.made] = before._replace(after=note.after, frozen=max(before.frozen, note.frozen))
            continue
        most = max(note.gathering, before.gathering), max(note.during, before.during)
        merged[note.made] = Note(note.made, *most, note.after, before.frozen)
    return tuple(merged[made] for made in sorted(merged))
