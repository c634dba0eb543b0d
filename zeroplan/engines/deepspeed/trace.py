"""Which parameters does DeepSpeed's ZeRO-3 hold gathered at each step of a forward and backward pass?

The coordinator records in the second pass which modules run in which order and, from the third on, gathers ahead, releases what
is not needed soon, and keeps the rest: decisions by element counts alone, so they depend neither on the number of ranks nor on
the batch. They are replayed here, step by step. Source: DeepSpeed 0.19.8, ``runtime/zero/partitioned_param_coordinator.py``.
"""

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from functools import lru_cache
from itertools import accumulate, permutations
from typing import TYPE_CHECKING, NamedTuple

from zeroplan.engines.deepspeed.flat import Row, Sizes, embedding_elements, has_tied_head
from zeroplan.engines.deepspeed.gathers import Piece, Sharing, Taken, taken
from zeroplan.engines.deepspeed.modules import (
    LEAF_FAMILIES,
    backward_order,
    block_modules,
    dropouts_of_embedding,
    reading_constants,
    rotary_calls,
)
from zeroplan.errors import SpecError
from zeroplan.spec.recipe import DeepSpeedOptions, Recompute
from zeroplan.transformer.blocks import RECOMPUTED
from zeroplan.transformer.params import layout

if TYPE_CHECKING:
    from zeroplan.spec.profile import Profile

_FORWARD, _BACKWARD = "forward", "backward"
_NEVER = 10**18
_AS_THEY_ARE = Sharing()
_FEW = 4
"""A module has no more parameters of its own, nor a leaf module those in it, in any family."""


class Freed(NamedTuple):
    """A module that has ended, whose parameters may be released."""

    parameters: tuple[int, ...]
    leaf: bool = False
    saved: tuple[int, ...] = ()
    """Those that autograd saves as they are gathered, so that they live on when they are released, until the backward.

    Checkpointing does that to what it recomputes; so does an operator other than ``linear`` that takes a view of the weight,
    as the grouped multiplication of experts does (DeepSpeed replaces ``linear`` to save the parameter instead).
    """
    dropped: bool = False
    """They go whoever needs them next: what is frozen and was recomputed goes with the module whose backward asked for it.

    Source: DeepSpeed 0.19.8, ``partitioned_param_coordinator.py``, ``update_recompute_parameters``.
    """


class Step(NamedTuple):
    """One module that starts, forward or backward, and the parameters it owns (their places in the row)."""

    direction: str
    parameters: tuple[int, ...]
    block: int
    made: int
    """Elements of the block's gradients made when it is done; in the forward 0."""
    frees: tuple[Freed, ...] = ()
    """Modules whose end is noticed before the next one starts, so that their parameters can be released."""
    inside: tuple[int, int] = (0, 0)
    """All parameters of it and of the modules in it: from the first place in the row up to the last one's next."""
    leaf: bool = False
    """It is gathered and released with all modules in it, and owns what they own."""
    name: str = ""

    @property
    def has_experts(self) -> bool:
        """Whether it gathers the experts of its block."""
        return self.leaf or self.name.endswith(".experts")


class Note(NamedTuple):
    """Elements held around one module's backward."""

    made: int
    """Elements of the block's gradients made when it is done."""
    gathering: int
    """Most while its parameters are gathered."""
    during: int
    after: int
    handing: int
    """When its gradients are handed on, and autograd has let go of what its operators saved."""


class Sent(NamedTuple):
    """What is all-gathered in one direction of a pass, in so many calls; with scales, of all ranks, where it is in 8 bits."""

    sizes: Sizes
    calls: int
    scales: int


@dataclass(frozen=True, eq=False, slots=True)
class Gathered:
    """Elements gathered in the course of one pass, copies and all; one object per model and options."""

    forward: tuple[int, ...]
    """Most during the forward of each block; where it has experts, less what gathering them takes for a moment."""
    before_experts: tuple[int, ...]
    """Most until the experts of each block are gathered and have made nothing yet; 0 where it has none."""
    head_gathering: int
    """Most while what the final norm and the head need is gathered, before either has made anything."""
    head_forward: int
    """While the head runs forward."""
    loss: int
    head: tuple[int, ...]
    """In the backward: at the loss, the head, the final norm."""
    past_head: int
    """Most when a gradient of the head or the final norm is made, with what they need gathered."""
    backward: tuple[tuple[Note, ...], ...]
    """Of each block, in the order of its gradients."""
    embedding: int
    end: int
    """Most while the embedding is gathered for its backward, and from then on."""
    sent_forward: Sent
    sent_backward: Sent
    persistent: int
    n_persistent: int
    """Elements and number of the parameters that are never released between steps."""
    persistent_sent: Sizes
    most_read: int = 0
    """Most parameters read from NVMe whose buffers are in use at once."""
    read_twice: bool = False
    """One is read ahead twice at a time."""
    modules: tuple[tuple[tuple[str, Note], ...], ...] = ()
    """Of each block with frozen weights, by the name of the module; and of its recomputation."""
    head_notes: tuple[Note, ...] = ()
    """Of what is after the blocks, in the order of its gradients; of a profile."""
    tied_head: int = 0
    """Elements of a gradient among those that waits for the embedding's; of a profile."""


@lru_cache(maxsize=64)
def gathered(
    whole: Row,
    options: DeepSpeedOptions,
    recompute: Recompute,
    sharing: Sharing = _AS_THEY_ARE,
    on_nvme: frozenset[int] = frozenset(),
) -> Gathered:
    """Replay one pass of the model, with one micro-batch per step.

    Those ``on_nvme`` are gathered ahead only once they have been read.
    """
    return _Replay(whole, options, trace(whole, again=recompute == "full"), sharing=sharing, on_nvme=on_nvme).run()


@lru_cache(maxsize=64)
def gathered_by_several(
    whole: Row,
    options: DeepSpeedOptions,
    recompute: Recompute,
    sharing: Sharing = _AS_THEY_ARE,
    on_nvme: frozenset[int] = frozenset(),
) -> Gathered:
    """The same with several micro-batches per step: that of a single one itself where nothing differs.

    The coordinator decides once, in the first pass with a complete trace, which parameters to release where
    (``__params_to_release`` is cached), and abides by it. With several micro-batches that pass is the second of the first
    step, before the first step has gathered the persistent parameters.
    """
    steps = trace(whole, again=recompute == "full")
    first = _Replay(whole, options, steps, persistent_missing=True, sharing=sharing, on_nvme=on_nvme)
    first.decide()
    single = gathered(whole, options, recompute, sharing, on_nvme)
    several = _Replay(whole, options, steps, decided=first.decided, sharing=sharing, on_nvme=on_nvme, later=True).run()
    return single if astuple(single) == astuple(several) else several


class _Module(NamedTuple):
    """A module of a block, or around the blocks."""

    name: str
    parameters: tuple[int, ...] = ()
    inside: tuple[int, int] = (0, 0)
    leaf: bool = False
    viewed: tuple[int, ...] = ()
    """Its parameters of which operators save views."""
    borrows: bool = False
    """Its parameters are those of a module in it, which it reads itself, so that they are gathered and released with it.

    A wrapper of peft's asks its ``lora_A`` for the dtype. Source: DeepSpeed 0.19.8, ``parameter_offload.py``, ``ZeROOrderedDict``.
    """
    lent: bool = False
    """Another module borrows its parameters, and releases them."""


@lru_cache(maxsize=64)
def trace(whole: Row, *, again: bool) -> tuple[Step, ...]:
    """Modules in the order in which they run; with ``again``, each block is recomputed in its backward."""
    if whole.model.profile is not None:
        return _trace_of_profile(whole, again=again)
    first, norm, head = _around(whole)
    blocks = [_modules(whole, block) for block in range(whole.n_blocks)]
    n_blocks, every = whole.n_blocks, len(whole.placed)
    root = _Module("", inside=(0, every))
    model = _Module("", inside=(0, every if whole.model.tie_word_embeddings else every - 1))
    wrappers = (root, root) if whole.model.adapter is not None else ()
    steps = [_begun(_FORWARD, module, -1) for module in (*wrappers, root, model)]
    steps += [*_forward(first, -1), *[_begun(_FORWARD, _Module(""), -1)] * _without_parameters(whole)]
    for block, modules in enumerate(blocks):
        steps += _forward(modules, block, again=again)
    steps += [*_forward((norm,), n_blocks), *_forward((head,), n_blocks)]
    steps += [*(_begun(_BACKWARD, module, n_blocks) for module in (*wrappers, root)), _alone(_BACKWARD, head, n_blocks, 1)]
    steps += [_begun(_BACKWARD, model, n_blocks)._replace(made=1), _alone(_BACKWARD, norm, n_blocks, 2)]
    for block in range(n_blocks - 1, -1, -1):
        steps += _backward(whole, blocks[block], block, again=again)
    if whole.model.adapter is not None and not again:
        return tuple(steps)  # nobody follows the embedding's output
    steps += [_begun(_BACKWARD, _Module(""), -1)] * dropouts_of_embedding(whole.model)
    return (*steps, *(_begun(_BACKWARD, module, -1) for module in reversed(first)))


def _trace_of_profile(whole: Row, *, again: bool) -> tuple[Step, ...]:
    """The same of a module that was traced, whose profile says which modules run in which order."""
    from zeroplan.transformer.profiled import profile_of  # noqa: PLC0415  only a profile pays for it

    profile, n_blocks = profile_of(whole.model), whole.n_blocks
    if any(name.endswith("experts") for names in profile.modules.kinds.values() for name in names):
        raise SpecError("a profile with experts is not modelled at stage 3 of engine 'deepspeed'; use a lower stage, or fsdp2")
    _refuse_homeless(profile)
    seen, blocks = profile.modules, [_modules(whole, block) for block in range(n_blocks)]
    before, after = (_outside(whole, names) for names in (seen.before, seen.after))
    tied = tuple(
        index for index, each in enumerate(whole.placed) if each.parameter.name == profile.tied_head and each.block < 0
    )
    after = tuple(module._replace(parameters=tied) if module.name == seen.tied else module for module in after)
    steps = [_begun(_FORWARD, _Module(name), -1) for name in seen.holding] + _forward(before, -1)
    for block, modules in enumerate(blocks):
        steps += _forward(modules, block, again=again)
    steps += _forward(after, n_blocks)
    steps += _back(whole, tuple(_after(seen.holding, after)), n_blocks)
    for block in range(n_blocks - 1, -1, -1):
        steps += _backward(whole, blocks[block], block, again=again)
    below = tuple(module for module in reversed(before) if module.name not in seen.unfollowed)
    return (*steps, *_back(whole, below, -1, unnoticed=seen.unnoticed))


def _refuse_homeless(profile: "Profile") -> None:
    """Refuse parameters that no module of their own runs with: DeepSpeed gathers them with another, or not at all."""
    seen = profile.modules
    outside = {*seen.before, *seen.after}
    named = [(tensor.name, outside) for tensor in (*profile.embeddings, *profile.tail)]
    named += [(tensor.name, {*seen.kinds[kind]}) for kind, tensors in profile.kinds.items() for tensor in tensors]
    for name, modules in named:
        if name.rpartition(".")[0] not in modules:
            raise SpecError(
                f"parameter {name!r} of the profile belongs to no module that runs by itself, which is not modelled at stage 3 of "
                "engine 'deepspeed'; use a lower stage, or fsdp2"
            )


def _outside(whole: Row, names: tuple[str, ...]) -> tuple[_Module, ...]:
    """Modules around the blocks with the parameters that they own."""
    owned: dict[str, list[int]] = {}
    for index, each in enumerate(whole.placed):
        if not 0 <= each.block < whole.n_blocks:
            owned.setdefault(each.parameter.name.rpartition(".")[0], []).append(index)
    return tuple(_Module(name, tuple(owned.get(name, ()))) for name in names)


def _after(holding: tuple[str, ...], after: tuple[_Module, ...]) -> Iterator[_Module]:
    """What is after the blocks as its backward begins: what holds them first, and what is in that, from the last on."""
    for at, name in enumerate(holding):
        yield _Module(name)
        inner = tuple(f"{one}." for one in holding[at + 1 :])
        mine = [
            one for one in after if one.name.startswith(f"{name}." if name else "") and not f"{one.name}.".startswith(inner)
        ]
        yield from reversed(mine)


def _back(whole: Row, modules: tuple[_Module, ...], block: int, *, unnoticed: tuple[str, ...] = ()) -> list[Step]:
    """Modules as their backward begins, with the elements made when each is done."""
    steps, made = list[Step](), 0
    for module in modules:
        made += sum(whole.trained[index] for index in module.parameters)
        frees = (_freed(module),) if module.parameters and module.name not in unnoticed else ()
        steps.append(_begun(_BACKWARD, module, block)._replace(made=made, frees=frees))
    return steps


def _without_parameters(whole: Row) -> int:
    """How many modules between the embedding and the first block have no parameters."""
    kinds = len({run.kind for run in layout(whole.model).runs})
    return dropouts_of_embedding(whole.model) + rotary_calls(whole.model, kinds)


def _around(whole: Row) -> tuple[tuple[_Module, ...], _Module, _Module]:
    """Return what runs before the first block, the norm after the last, and the head."""
    named: dict[str, list[int]] = {}
    for index, each in enumerate(whole.placed):
        if not 0 <= each.block < whole.n_blocks:
            named.setdefault(each.parameter.name.rpartition(".")[0] or each.parameter.name, []).append(index)
    found = [_Module(name, tuple(places), (places[0], places[-1] + 1)) for name, places in named.items()]
    head = found[0] if whole.model.tie_word_embeddings else found.pop()
    norm = found.pop()  # OPT's is registered before its blocks, as the last of those
    return tuple(found), norm, head


def _begun(direction: str, module: _Module, block: int) -> Step:
    return Step(direction, module.parameters, block, 0, inside=module.inside, leaf=module.leaf, name=module.name)


def _freed(module: _Module, saved: tuple[int, ...] = ()) -> Freed:
    return Freed(module.parameters, module.leaf, saved)


def _alone(direction: str, module: _Module, block: int, made: int) -> Step:
    return _begun(direction, module, block)._replace(made=made, frees=(_freed(module),))


def _forward(modules: tuple[_Module, ...], block: int, *, again: bool = False) -> list[Step]:
    """Return modules as they run forward; what is to be recomputed (``again``) saves nothing yet."""
    steps = [_begun(_FORWARD, module, block) for module in modules]
    for module, last in _ends([module.name for module in modules], modules):
        steps[last] = steps[last]._replace(frees=(*steps[last].frees, _freed(module, () if again else module.viewed)))
    return steps


def _ends(names: list[str], modules: tuple[_Module, ...]) -> Iterator[tuple[_Module, int]]:
    """Yield modules that own parameters with the place, in order, of the last module in them; inner ones first."""
    for at in range(len(modules) - 1, -1, -1):
        if modules[at].parameters and not modules[at].lent:
            inside = [place for place, name in enumerate(names) if name.startswith(f"{names[at]}.")]
            yield modules[at], max((at, *inside))


def _backward(whole: Row, modules: tuple[_Module, ...], block: int, *, again: bool) -> list[Step]:
    """Return a block's modules as their backward begins; the first that needs it has the block recomputed, and waits."""
    by_name = {module.name: module for module in modules}
    constant = _constants(whole, modules, block, again=again)
    names = backward_order([module.name for module in modules[1:]])
    ordered = (modules[0], *(by_name[name] for name in names if name not in constant.unfollowed))
    steps, made = list[Step](), 0
    for module in ordered:
        made += 0 if module.borrows else sum(whole.trained[index] for index in module.parameters)
        steps.append(_begun(_BACKWARD, module, block)._replace(made=made))
    for module, last in _ends([module.name for module in ordered], ordered):
        if module.name not in constant.unnoticed:
            steps[last] = steps[last]._replace(frees=(*steps[last].frees, _freed(module)))
    if not again:
        return steps
    first = next(at for at, module in enumerate(ordered) if module.parameters and not module.borrows)
    run_again, waiting = _recomputed(modules, block, ordered[first].name), steps[first]
    run_again, dropped = _without_frozen(whole, run_again)
    frees = (*waiting.frees, Freed(dropped, dropped=True)) if dropped else waiting.frees
    done = run_again[-1]._replace(direction=_BACKWARD, made=waiting.made, frees=frees)
    return [*steps[:first], waiting._replace(made=0, frees=()), *run_again[:-1], done, *steps[first + 1 :]]


def _without_frozen(whole: Row, run_again: list[Step]) -> tuple[list[Step], tuple[int, ...]]:
    """Leave frozen parameters out of what a recomputation frees, and return them."""
    if whole.model.adapter is None:
        return run_again, ()
    frozen = tuple(index for step in run_again for index in step.parameters if not whole.trained[index])
    kept = [step._replace(frees=tuple(_but(frozen, freed) for freed in step.frees)) for step in run_again]
    return kept, frozen


def _but(frozen: tuple[int, ...], freed: Freed) -> Freed:
    return freed._replace(parameters=tuple(index for index in freed.parameters if index not in frozen))


def _recomputed(modules: tuple[_Module, ...], block: int, last: str) -> list[Step]:
    """Return the modules of a block run forward once more, up to the one that waits in its backward, and what is in it."""
    names = [module.name for module in modules]
    end = max(at for at, name in enumerate(names) if name == last or name.startswith(f"{last}."))
    saved = tuple(module._replace(viewed=module.parameters) for module in modules[1 : end + 1])
    return _forward(saved, block)


@lru_cache(maxsize=64)
def _inside(whole: Row) -> tuple[tuple[tuple[int, str], ...], ...]:
    """Return of each block the places and names of its parameters."""
    blocks: list[list[tuple[int, str]]] = [[] for _ in range(whole.n_blocks)]
    for index, each in enumerate(whole.placed):
        if 0 <= each.block < whole.n_blocks:
            blocks[each.block].append((index, each.parameter.name))
    return tuple(tuple(block) for block in blocks)


def _modules(whole: Row, block: int) -> tuple[_Module, ...]:
    """Return a block and its modules in the order in which they run forward, those without parameters too."""
    inside = _inside(whole)[block]
    owners: dict[str, list[int]] = {}
    for index, name in inside:
        owners.setdefault(name.rpartition(".")[0], []).append(index)
    names = _names(whole, block, tuple(owners))
    leaf = whole.model.family in LEAF_FAMILIES and any(name.endswith("experts") for name in owners)
    modules = [_Module("", inside=(inside[0][0], inside[-1][0] + 1))]
    for name in names:
        if leaf and name.startswith("mlp."):
            continue
        places = [index for index, parameter in inside if parameter.startswith(f"{name}.")]
        borrowed = owners.get(f"{name}.lora_A.default", [])
        own = places if leaf and name == "mlp" else borrowed or owners.get(name, [])
        viewed = [index for index in own if ".experts." in whole.placed[index].parameter.name]
        bounds = (places[0], places[-1] + 1) if places else (0, 0)
        lent = name.endswith(".lora_A.default")
        modules.append(_Module(name, tuple(own), bounds, leaf and name == "mlp", tuple(viewed), bool(borrowed), lent))
    return tuple(modules)


def _names(whole: Row, block: int, owners: tuple[str, ...]) -> tuple[str, ...]:
    if whole.model.profile is None:
        return block_modules(whole.model, owners)
    from zeroplan.transformer.profiled import profile_of  # noqa: PLC0415  only a profile pays for it

    profile = profile_of(whole.model)
    kinds = [run.kind for run in profile.runs for _ in range(run.layers)]
    return profile.modules.kinds[kinds[block]]


class _Constants(NamedTuple):
    """Modules of a block that autograd does not follow at all, and those whose end in the backward nobody notices."""

    unfollowed: frozenset[str] = frozenset()
    unnoticed: frozenset[str] = frozenset()


def _constants(whole: Row, modules: tuple[_Module, ...], block: int, *, again: bool) -> _Constants:
    """In the first block, whose input has no gradient, nothing that comes before all adapters has a backward."""
    adapter = whole.model.adapter
    if adapter is None or again or block:
        return _Constants()
    reading = reading_constants(adapter.layers, [module.name for module in modules[1:]])
    trains = {
        module.name for module in modules
        if any(whole.trained[index] for index in range(*module.inside))
    }  # fmt: skip
    return _Constants(frozenset(reading - trains), frozenset(reading & trains))


class _Handle:
    """One all-gather: its parameters, those not yet used, and whether it has been waited for."""

    def __init__(self, parameters: tuple[int, ...], takes: Taken) -> None:
        self.parameters = parameters
        self.waiting = set(parameters)
        self.takes = takes
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
        sharing: Sharing,
        on_nvme: frozenset[int],
        later: bool = False,
    ) -> None:
        self.numel = [each.end - each.start for each in whole.placed]
        self.frozen = [each.parameter.frozen for each in whole.placed]
        self.profiled = whole.model.profile is not None
        self.tied_head = embedding_elements(whole) if self.profiled and has_tied_head(whole) else 0
        self.options = options
        self.n_blocks = whole.n_blocks
        self.steps = steps
        self.persistent = _persistent(self.numel, options)
        self.resident = frozenset() if persistent_missing else self.persistent
        self.decided = set() if decided is None else decided
        self.decides = decided is None
        self.sharing = sharing
        self.on_nvme = on_nvme
        self.read: set[int] = set()
        self.most_read, self.read_twice = 0, False
        self.uses = _uses(steps)
        per_step = (0 if step.leaf else sum(self.numel[index] for index in step.parameters) for step in steps)
        self.starts = (*whole.starts, whole.n_elements)
        self.traversed = (0, *accumulate(per_step))
        self.queue = deque((index, at) for at, step in enumerate(steps) for index in sorted(step.parameters))
        self.fetched_for: dict[int, int] = {}
        self.available: set[int] = set()
        self.in_flight: dict[int, _Handle] = {}
        self.counted = 0
        self.saved: dict[int, int] = {}
        self.second = {index: -(-numel // options.zero_hpz_partition_size) for index, numel in enumerate(self.numel)}
        self.elements = 0
        if options.zero_hpz_partition_size == 1:
            self.second = {}
        elif later:  # an earlier micro-batch of the step has left them
            self.elements = sum(second for index, second in self.second.items() if index not in self.persistent)
            self.second = {}
        self.peak = 0
        self.sent: dict[str, Counter[int]] = {_FORWARD: Counter(), _BACKWARD: Counter()}
        self.calls = {_FORWARD: 0, _BACKWARD: 0}
        self.scales = {_FORWARD: 0, _BACKWARD: 0}

    def decide(self) -> None:
        """Go through all steps for what is released where, and note nothing else."""
        turned = False
        for at, step in enumerate(self.steps):
            turned = turned or step.direction == _BACKWARD
            self._fetch(at, step, turned=turned)
            self._release(at, step)

    def run(self) -> Gathered:
        """Go through all steps and note what is held."""
        forward, before, head = [0] * self.n_blocks, [0] * self.n_blocks, list[int]()
        of_head = list[tuple[Step, Note]]()
        backward: dict[int, list[tuple[Step, Note]]] = {block: [] for block in range(self.n_blocks)}
        head_gathering, head_forward, loss, embedding, turned, past_head = 0, 0, 0, 0, False, 0
        for at, step in enumerate(self.steps):
            if step.direction == _BACKWARD and not turned:
                loss, turned = self.elements, True
            gathering = self._fetch(at, step, turned=turned)
            during, handing = self.elements, self.elements - self._saved_of(step)
            self._release(at, step)
            if not turned and 0 <= step.block < self.n_blocks:
                if step.has_experts:
                    before[step.block], gathering = max(forward[step.block], gathering), during
                forward[step.block] = max(forward[step.block], gathering)
            elif not turned and step.block == self.n_blocks:
                head_gathering, head_forward = max(head_gathering, gathering), during
            elif turned and step.block == self.n_blocks:
                of_head.append((step, Note(step.made, gathering, during, self.elements, handing)))
                head.append(gathering)
                past_head = during if len(head) > 2 else 0
            elif turned and step.block >= 0:
                backward[step.block].append((step, Note(step.made, gathering, during, self.elements, handing)))
            elif turned:
                embedding = max(embedding, gathering)
        notes, modules = self._of_blocks(backward)
        head_notes = _per_gradient(of_head) if self.profiled else ()
        return Gathered(
            tuple(forward), tuple(before), head_gathering, head_forward, loss,
            (max(head[:-3], default=0), head[-min(3, len(head))], max(head[-2:])), past_head, notes, embedding, self.elements,
            self._sent(_FORWARD), self._sent(_BACKWARD),
            sum(self.numel[index] for index in self.persistent), len(self.persistent),
            _sizes(Counter(self.numel[index] for index in self.persistent)), self.most_read, self.read_twice, modules,
            head_notes, self.tied_head,
        )  # fmt: skip

    def _sent(self, direction: str) -> Sent:
        return Sent(_sizes(self.sent[direction]), self.calls[direction], self.scales[direction])

    def _of_blocks(
        self, backward: dict[int, list[tuple[Step, Note]]]
    ) -> tuple[tuple[tuple[Note, ...], ...], tuple[tuple[tuple[str, Note], ...], ...]]:
        """Return the notes of each block, by gradients; and by modules, where some are frozen."""
        blocks = [backward[block] for block in range(self.n_blocks)]
        if not any(self.frozen):
            return tuple(map(_per_gradient, blocks)), ()
        making = ([(step, note) for step, note in block if not self._idle(step)] for block in blocks)
        return tuple(map(_per_gradient, making)), tuple(map(_per_module, blocks))

    def _idle(self, step: Step) -> bool:
        """Whether a module makes no gradients, though it has parameters."""
        return bool(step.parameters) and all(self.frozen[index] for index in step.parameters)

    def _fetch(self, at: int, step: Step, *, turned: bool) -> int:
        direction = _BACKWARD if turned else _FORWARD
        self.peak = self.elements
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
        takes = taken(tuple(self._piece(index) for index in sorted(indices)), self.sharing, one_by_one=one_by_one)
        self._read(indices)
        self.read -= self.persistent  # which are never released, so their buffers are
        self.in_flight.update(dict.fromkeys(indices, _Handle(tuple(indices), takes)))
        self.counted += numel
        self.sent[direction].update(self.numel[index] for index in indices)
        self.calls[direction] += len(indices) if one_by_one else 1
        self.scales[direction] += takes.scales
        for change in takes.asked:
            self._hold(change)

    def _piece(self, index: int) -> Piece:
        """A parameter as it is gathered: from all ranks, or within the group that has a second partition of it."""
        numel, ranks, group = self.numel[index], self.sharing.ranks or 1, self.options.zero_hpz_partition_size
        if group == 1 or index in self.second:
            return Piece(numel, -(-numel // ranks), ranks)
        return Piece(numel, -(-numel // ranks) * ranks // group, group)

    def _wait(self, index: int) -> None:
        """Copy everything of a gather out on first use; what it was gathered in goes with its last parameter's use."""
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
        """Of all orders in which parameters may be waited for, since they are in a set, the one that takes most at once."""
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
        """Read from NVMe what comes next, as far as buffers go (``__prefetch_nvme_param_partitions``)."""
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
        """A parameter from NVMe has a buffer from then on until it is released."""
        self.read.update(index for index in indices if index in self.on_nvme)
        self.most_read = max(self.most_read, len(self.read))

    def _saved_of(self, step: Step) -> int:
        return sum(self.saved.get(index, 0) for index in step.parameters)

    def _release(self, at: int, step: Step) -> None:
        for freed in step.frees:
            for index in freed.parameters:
                if self.decides and not freed.dropped and not self._stays(index, at + 1, leaf=freed.leaf):
                    self.decided.add((at, index))
                goes = freed.dropped or (at, index) in self.decided
                if index in self.persistent or index not in self.available or not goes:
                    continue
                self.available.discard(index)
                self.read.discard(index)
                self.counted -= self.numel[index]
                self._hold(self.second.pop(index, 0))
                if index in freed.saved:
                    self.saved[index] = self.numel[index]
                else:
                    self._hold(-self.numel[index])
            if step.direction == _BACKWARD:
                self._hold(-sum(self.saved.pop(index, 0) for index in freed.parameters))

    def _stays(self, index: int, at: int, *, leaf: bool) -> bool:
        """Whether a prefetch counts on it, or it is used again before ``max_reuse_distance`` elements of other modules have run.

        The coordinator walks over the modules to come with or without those in them as the one that has ended is a leaf or not
        (``__params_to_release``): a leaf counts and finds nothing of its own, and after it a block counts as a whole and piecewise.
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


def _sizes(counted: Counter[int]) -> Sizes:
    return tuple(sorted(counted.items()))


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


def _per_gradient(notes: list[tuple[Step, Note]]) -> tuple[Note, ...]:
    """Merge notes into one per number of gradients made; what a module without parameters fetches is there after the one before."""
    merged: dict[int, Note] = {}
    for step, note in notes:
        before = merged.get(note.made, note)
        if step.parameters or not note.made:
            most = max(note.gathering, before.gathering), max(note.during, before.during), note.after
            merged[note.made] = Note(note.made, *most, max(note.handing, before.handing))
        else:
            merged[note.made] = before._replace(after=note.after)
    return tuple(merged[made] for made in sorted(merged))


def _per_module(notes: list[tuple[Step, Note]]) -> tuple[tuple[str, Note], ...]:
    """Name notes after modules; those of a recomputation hold most until then, and the last of them has a name of its own."""
    named: dict[str, Note] = {}
    for step, note in notes:
        if step.direction == _BACKWARD:
            named[step.name] = note
            continue
        most = max(note.gathering, named[RECOMPUTED].gathering if RECOMPUTED in named else 0)
        named[RECOMPUTED] = named[f"{RECOMPUTED}: {step.name}"] = note._replace(gathering=most)
    return tuple(named.items())
