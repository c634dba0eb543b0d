"""The order of a model's modules under DeepSpeed's ZeRO-3, and the points where their parameters may be released.

The coordinator's hooks surround every module, with or without parameters. Source: DeepSpeed 0.19.8,
``runtime/zero/parameter_offload.py`` and ``partitioned_param_coordinator.py``.
"""

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from zeroplan.engines.modules import (
    LEAF_FAMILIES,
    backward_order,
    block_modules,
    dropouts_of_embedding,
    reading_constants,
    reading_the_input,
    rotary_calls,
)
from zeroplan.engines.rows import Row
from zeroplan.errors import SpecError
from zeroplan.transformer.params import has_frozen, is_frozen, layout, runs_in_order, without_backward
from zeroplan.transformer.vision import BESIDE_THE_TEXT, blocks_before, name_in_a_llama

if TYPE_CHECKING:
    from zeroplan.spec.profile import Profile

FORWARD, BACKWARD = "forward", "backward"


#: Families whose grouped product reads the experts' weights directly; others read a transposed view (transformers 5.23,
#: integrations/moe.py, ``_grouped_linear``). A direct product saves the parameter, so the gathered tensor can be freed.
_EXPERTS_AS_THEY_ARE = ("gpt_oss", "llama4_text")

#: Families whose linear layers multiply by a transposed view of their weight, which autograd saves; DeepSpeed replaces only torch's
#: own ``linear`` (transformers 5.23, models/falcon/modeling_falcon.py, ``FalconLinear``).
_TRANSPOSED = ("falcon",)

#: Ending of modules whose output only chooses experts, so that no backward reaches them: ERNIE's router adds its bias in one.
_CHOOSES = ".moe_statics"


#: Families whose model reads the embedding's dtype or device in its own forward, so that DeepSpeed gathers the embedding with the
#: model and releases it with the model: transformers 5.23, modeling_llama4.py, ``Llama4TextModel.forward``; DeepSpeed 0.19.8,
#: ``parameter_offload.py``, ``ZeROOrderedDict.__getitem__``. No hook sees the model's end in the backward.
_MODEL_READS_EMBEDDING = ("llama4_text",)


#: LFM2's convolution, which never runs as a module: the module around it reads the weight, so DeepSpeed gathers it with that module
#: (transformers 5.23, models/lfm2/modeling_lfm2.py, ``Lfm2ShortConv.forward``; DeepSpeed 0.19.8, ``ZeROOrderedDict.__getitem__``).
_CONVOLUTION = "conv.conv"


class Freed(NamedTuple):
    """A module that has ended, so that its parameters may be released."""

    parameters: tuple[int, ...]
    leaf: bool = False
    saved: tuple[int, ...] = ()
    """Parameters whose gathered tensors autograd saves, so that they stay alive after their release until the backward.

    Checkpointing does this to recomputed modules. So does an operator other than ``linear`` that takes a view of the weight,
    such as the experts' grouped product (DeepSpeed replaces ``linear`` to save the parameter instead).
    """
    dropped: bool = False
    """Release them whoever needs them next: recomputed frozen parameters are released with the module whose backward needed them.

    Source: DeepSpeed 0.19.8, ``partitioned_param_coordinator.py``, ``update_recompute_parameters``.
    """
    name: str = ""
    """Name of the module; if ``dropped``, of the module whose backward needed them."""


class Step(NamedTuple):
    """One module that starts, forward or backward, and the row indices of the parameters that it owns."""

    direction: str
    parameters: tuple[int, ...]
    block: int
    made: int
    """Elements of the block's gradients made by its end; 0 in the forward."""
    frees: tuple[Freed, ...] = ()
    """Modules whose end a hook sees before the next module starts, so that their parameters can be released."""
    inside: tuple[int, int] = (0, 0)
    """Range of row indices of its parameters and of those of modules inside it."""
    leaf: bool = False
    """It is gathered and released with all modules inside it, and owns their parameters."""
    name: str = ""
    in_graph: tuple[int, ...] = ()
    """Parameters whose gathered tensors an attribute of a graph node holds, so that they live as long as the loss.

    bitsandbytes' product with packed weights does: bitsandbytes 0.50, autograd/_functions.py, ``MatMul4Bit.forward``.
    """

    @property
    def only_contains(self) -> bool:
        """Whether it has no parameters of its own, or is the model that reads the embedding's."""
        return not self.parameters or not self.name

    @property
    def has_experts(self) -> bool:
        """Whether it gathers the experts of its block."""
        return self.leaf or self.name.endswith(".experts")


class _Module(NamedTuple):
    """A module of a block, or around the blocks."""

    name: str
    parameters: tuple[int, ...] = ()
    inside: tuple[int, int] = (0, 0)
    leaf: bool = False
    viewed: tuple[int, ...] = ()
    """Its parameters whose views operators save."""
    reads_an_inner_module: bool = False
    """It reads the parameters of a module inside it, so they are gathered and released with it.

    A wrapper of peft's reads the dtype of its ``lora_A``. Source: DeepSpeed 0.19.8, ``parameter_offload.py``,
    ``ZeROOrderedDict``.
    """
    read_from_outside: bool = False
    """Another module reads its parameters, and releases them."""
    in_graph: tuple[int, ...] = ()
    """As :class:`Step` has them."""


@lru_cache(maxsize=64)
def trace(whole: Row, *, recomputed: int, linears_of_torch: bool = False) -> tuple[Step, ...]:
    """Return the modules in the order in which they run; the backward recomputes the first ``recomputed`` blocks.

    ``linears_of_torch``: DeepSpeed keeps torch's ``linear`` (``memory_efficient_linear`` false), which saves views of gathered
    weights.
    """
    if whole.model.profile is not None:
        return _trace_of_profile(whole, recomputed=recomputed)
    first, norm, head = _around(whole)
    lowest = lowest_backward(whole, recomputed)
    if linears_of_torch:
        head = head._replace(viewed=head.parameters)
    every = len(whole.placed)
    root = _Module("", inside=(0, every))
    model = _Module("", inside=(0, every - _of_head(whole)))
    if whole.model.family in _MODEL_READS_EMBEDDING:
        model = model._replace(parameters=first[0].parameters, reads_an_inner_module=True)
        first = (first[0]._replace(read_from_outside=True), *first[1:])
    roots = (root, root, root) if whole.model.adapter is not None else (root,)
    first, between = _around_the_tower(whole, first)
    parts = _Parts(roots, model, first, between, _Blocks(whole, recomputed, lowest, linears_of_torch), norm, head)
    return (*_forward_of(whole, parts), *_backward_of(whole, parts))


class _Parts(NamedTuple):
    """A model's modules, in the order in which they run."""

    roots: tuple[_Module, ...]
    """The whole model, and what adapters wrap around it."""
    model: _Module
    first: tuple[_Module, ...]
    between: Mapping[int, tuple[_Module, ...]]
    """Modules that run before a block."""
    blocks: "_Blocks"
    norm: _Module
    head: _Module


class _Blocks:
    """The steps of every block. Blocks of one kind run the same modules, whose parameters have other indices."""

    def __init__(self, whole: Row, recomputed: int, lowest: int, linears_of_torch: bool) -> None:  # noqa: FBT001  as in a key
        self.whole, self.recomputed, self.lowest, self.linears_of_torch = whole, recomputed, lowest, linears_of_torch
        self._kinds = runs_in_order(whole.model)
        self._known = dict[tuple[int | bool | str, ...], tuple[int, list[Step]]]()

    def steps(self, direction: str, block: int) -> list[Step]:
        """Return the steps of a block, forward or backward."""
        begins = _inside(self.whole)[block][0][0]
        kind = direction, self._kinds[block], block < self.recomputed, block == self.lowest
        if kind not in self._known:
            self._known[kind] = begins, self._of_one(direction, block)
        first, steps = self._known[kind]
        return [_moved(step, block, begins - first) for step in steps] if begins != first else steps

    def _of_one(self, direction: str, block: int) -> list[Step]:
        modules = _followed(self.whole, _modules(self.whole, block), at_input=block != self.lowest)
        if self.linears_of_torch:
            modules = tuple([_with_linear_viewed(self.whole, module) for module in modules])
        if direction == FORWARD:
            return _forward(modules, block, again=block < self.recomputed)
        return _backward(self.whole, modules, block, recomputed=self.recomputed)


def _moved(step: Step, block: int, by: int) -> Step:
    """Return the same step of another block, whose parameters come ``by`` places later."""
    direction, parameters, _, made, frees, (low, high), leaf, name, in_graph = step
    moved = tuple([
        Freed(_later(freed.parameters, by), freed.leaf, _later(freed.saved, by), freed.dropped, freed.name) for freed in frees
    ])  # fmt: skip
    inside = (low + by, high + by) if high else (0, 0)
    return Step(direction, _later(parameters, by), block, made, moved, inside, leaf, name, _later(in_graph, by))


def _later(indices: tuple[int, ...], by: int) -> tuple[int, ...]:
    return tuple([index + by for index in indices]) if indices else ()


def _forward_of(whole: Row, parts: _Parts) -> list[Step]:
    n_blocks, model = whole.n_blocks, parts.model
    steps = [_begun(FORWARD, module, -1) for module in (*parts.roots, model)]
    steps += _forward(parts.first, -1)
    for block in range(n_blocks):
        steps += _forward(parts.between.get(block, ()), -1)
        if block == whole.model.tower_layers:
            steps += [_begun(FORWARD, _Module(""), -1)] * _without_parameters(whole)
        steps += parts.blocks.steps(FORWARD, block)
    steps += _forward((parts.norm,), n_blocks)
    steps[-1] = steps[-1]._replace(frees=(*steps[-1].frees, _freed(model))) if model.reads_an_inner_module else steps[-1]
    return steps + _forward((parts.head,), n_blocks)


def _backward_of(whole: Row, parts: _Parts) -> list[Step]:
    n_blocks, first, between, recomputed, lowest = (
        whole.n_blocks, parts.first, parts.between, parts.blocks.recomputed, parts.blocks.lowest
    )  # fmt: skip
    steps = [*(_begun(BACKWARD, module, n_blocks) for module in parts.roots), _alone(BACKWARD, parts.head, n_blocks, 1)]
    steps += [_begun(BACKWARD, parts.model, n_blocks)._replace(made=1), _alone(BACKWARD, parts.norm, n_blocks, 2)]
    unreached = without_backward(whole.model, recomputed=bool(recomputed))
    if unreached:
        first = tuple(module for module in first if not _of_frozen_images(whole, module))
        between = {at: tuple(one for one in some if not _of_frozen_images(whole, one)) for at, some in between.items()}
    for block in range(n_blocks - 1, max(lowest, 0) - 1, -1):
        steps += parts.blocks.steps(BACKWARD, block) if block >= unreached else []
        steps += [_begun(BACKWARD, module, -1) for module in reversed(between.get(block, ()))]
    if lowest >= 0:
        return steps  # autograd does not track the embedding's output
    steps += [_begun(BACKWARD, _Module(""), -1)] * dropouts_of_embedding(whole.model)
    return [*steps, *(_below(module) for module in reversed(first))]


def _below(module: _Module) -> Step:
    """Return the backward of a module before the blocks. Its end is seen if its input has a gradient, as token ids have not."""
    step = _begun(BACKWARD, module, -1)
    return step._replace(frees=(_freed(module),)) if module.name.startswith("model.per_layer_") else step


def _around_the_tower(
    whole: Row, first: tuple[_Module, ...]
) -> tuple[tuple[_Module, ...], dict[int, tuple[_Module, ...]]]:  # fmt: skip
    """Return the modules before the first block; and those of a vision tower that run after its blocks, by the next block."""
    vision = whole.model.vision
    if vision is None or not vision.has_blocks:
        return first, {}
    places = [blocks_before(vision, module.name) for module in first]
    between = {at: tuple(module for module, place in zip(first, places, strict=True) if place == at) for at in set(places)}
    return between.pop(0), between


def _of_frozen_images(whole: Row, module: _Module) -> bool:
    """Whether a module is a frozen one before the text: without a gradient in the tower, none reaches it."""
    return module.name.startswith(BESIDE_THE_TEXT) and not any(whole.trained[index] for index in module.parameters)


def lowest_backward(whole: Row, recomputed: int) -> int:
    """Return the lowest block with a backward: the first with trained weights, or -1 if autograd tracks the embedding's output.

    With recomputation it does: transformers 5.23, modeling_utils.py, ``_activation_checkpointing_enable``.
    """
    if recomputed or not is_frozen(whole.model, "embedding"):
        return -1
    return min(each.block for each, trained in zip(whole.placed, whole.trained, strict=True) if trained)


def _trace_of_profile(whole: Row, *, recomputed: int) -> tuple[Step, ...]:
    """Return the same for a traced module, whose profile has the order of its modules."""
    from zeroplan.transformer.profiled import profile_of  # noqa: PLC0415  only a profile pays for it

    profile, n_blocks = profile_of(whole.model), whole.n_blocks
    if any(name.endswith("experts") for names in profile.modules.kinds.values() for name in names):
        raise SpecError("a profile with experts is not modelled at stage 3 of engine 'deepspeed'; use a lower stage, or fsdp2")
    _refuse_outside_modules(profile)
    seen, blocks = profile.modules, [_modules(whole, block) for block in range(n_blocks)]
    before, after = (_outside(whole, names) for names in (seen.before, seen.after))
    tied = tuple(
        index for index, each in enumerate(whole.placed) if each.parameter.name == profile.tied_head and each.block < 0
    )
    after = tuple(module._replace(parameters=tied) if module.name == seen.tied else module for module in after)
    steps = [_begun(FORWARD, _Module(name), -1) for name in seen.holding] + _forward(before, -1)
    for block, modules in enumerate(blocks):
        steps += _forward(modules, block, again=block < recomputed)
    steps += _forward(after, n_blocks)
    steps += _back(whole, tuple(_after(seen.holding, after)), n_blocks)
    for block in range(n_blocks - 1, -1, -1):
        steps += _backward(whole, blocks[block], block, recomputed=recomputed)
    below = tuple(module for module in reversed(before) if module.name not in seen.unfollowed)
    return (*steps, *_back(whole, below, -1, unnoticed=seen.unnoticed))


def _refuse_outside_modules(profile: "Profile") -> None:
    """Raise SpecError for parameters of no running module: DeepSpeed gathers them with a block, with the model, or never."""
    seen = profile.modules
    outside = (*seen.before, *seen.after)
    named = [(tensor.name, outside) for tensor in (*profile.embeddings, *profile.tail)]
    named += [(tensor.name, seen.kinds[kind]) for kind, tensors in profile.kinds.items() for tensor in tensors]
    for name, modules in named:
        if not _reader(name, modules):
            raise SpecError(
                f"parameter {name!r} of the profile belongs to no module that runs by itself, which is not modelled at stage 3 of "
                "engine 'deepspeed'; use a lower stage, or fsdp2"
            )


def _reader(parameter: str, modules: tuple[str, ...]) -> str:
    """Return the nearest running module around a parameter; empty if none of ``modules`` is.

    ``nn.MultiheadAttention`` never calls its ``out_proj`` but reads its weight. DeepSpeed detects the reader, and from then on
    gathers and releases the parameter with it (0.19.8, ``parameter_offload.py``, ``ZeROOrderedDict.__getitem__``, and
    ``partition_parameters.py``, ``register_external_parameter``).

    >>> _reader("attention.out_proj.weight", ("norm", "attention", "mlp.0"))
    'attention'
    """
    name = parameter.rpartition(".")[0]
    while name and name not in modules:
        name = name.rpartition(".")[0]
    return name


def _outside(whole: Row, names: tuple[str, ...]) -> tuple[_Module, ...]:
    owned: dict[str, list[int]] = {}
    for index, each in enumerate(whole.placed):
        if not 0 <= each.block < whole.n_blocks:
            owned.setdefault(_reader(each.parameter.name, names), []).append(index)
    viewed = {index for places in owned.values() for index in places if _is_viewed(whole.placed[index].parameter.name)}
    own = ((name, tuple(owned.get(name, ()))) for name in names)
    return tuple(_Module(name, places, viewed=tuple(index for index in places if index in viewed)) for name, places in own)


def _after(holding: tuple[str, ...], after: tuple[_Module, ...]) -> Iterator[_Module]:
    """Yield modules after the blocks in the order of their backward: containers first, then their contents from the last on."""
    for at, name in enumerate(holding):
        yield _Module(name)
        inner = tuple(f"{one}." for one in holding[at + 1 :])
        mine = [
            one for one in after if one.name.startswith(f"{name}." if name else "") and not f"{one.name}.".startswith(inner)
        ]
        yield from reversed(mine)


def _back(whole: Row, modules: tuple[_Module, ...], block: int, *, unnoticed: tuple[str, ...] = ()) -> list[Step]:
    """Return modules in the order of their backward, with the elements made by the end of each."""
    steps, made = list[Step](), 0
    for module in modules:
        made += sum(whole.trained[index] for index in module.parameters)
        frees = (_freed(module),) if module.parameters and module.name not in unnoticed else ()
        steps.append(_begun(BACKWARD, module, block)._replace(made=made, frees=frees))
    return steps


def _without_parameters(whole: Row) -> int:
    """Return the number of modules without parameters between the embedding and the first block."""
    kinds = len({run.kind for run in layout(whole.model).runs}) if whole.model.per_layer is None else 2
    return dropouts_of_embedding(whole.model) + rotary_calls(whole.model, kinds)


def _around(whole: Row) -> tuple[tuple[_Module, ...], _Module, _Module]:
    """Return the modules before the first block, the norm after the last, and the head."""
    named: dict[str, list[int]] = {}
    for index, each in enumerate(whole.placed):
        if not 0 <= each.block < whole.n_blocks:
            named.setdefault(each.parameter.name.rpartition(".")[0] or each.parameter.name, []).append(index)
    found = [_Module(name, tuple(places), (places[0], places[-1] + 1)) for name, places in named.items()]
    found = [module for module in found if not module.name.endswith(_UNUSED)]
    head = found.pop() if _of_head(whole) else found[0]
    # OPT's norm is registered before its blocks, after the embeddings, and Gemma 4's before the embeddings of each layer
    norm = found.pop(-1 if whole.model.per_layer is None else 1)
    return tuple(found), norm, head


#: The frozen original beside a copy that is trained whole: peft 0.21, utils/other.py, ModulesToSaveWrapper._forward_wrapped.
_UNUSED = ".original_module"


def _of_head(whole: Row) -> int:
    """Return the number of the head's own parameters; 0 if it is the embedding. With a trained copy they are two."""
    adapter = whole.model.adapter
    copied = adapter is not None and adapter.trains("head")
    return int(copied) + int(not whole.model.tie_word_embeddings)


def _begun(direction: str, module: _Module, block: int) -> Step:
    return Step(direction, module.parameters, block, 0, (), module.inside, module.leaf, module.name, module.in_graph)


def _freed(module: _Module, saved: tuple[int, ...] = ()) -> Freed:
    return Freed(module.parameters, module.leaf, saved, name=module.name)


def _alone(direction: str, module: _Module, block: int, made: int) -> Step:
    return _begun(direction, module, block)._replace(made=made, frees=(_freed(module),))


def _forward(modules: tuple[_Module, ...], block: int, *, again: bool = False) -> list[Step]:
    """Return modules in forward order. Those to be recomputed (``again``) save nothing yet."""
    steps = [_begun(FORWARD, module, block) for module in modules]
    for module, last in _ends([module.name for module in modules], modules):
        steps[last] = steps[last]._replace(frees=(*steps[last].frees, _freed(module, () if again else module.viewed)))
    return steps


def _ends(names: list[str], modules: tuple[_Module, ...]) -> Iterator[tuple[_Module, int]]:
    """Yield modules that own parameters, each with the index of the last module inside it; inner ones first."""
    for at in range(len(modules) - 1, -1, -1):
        if modules[at].parameters and not modules[at].read_from_outside:
            inside = [place for place, name in enumerate(names) if name.startswith(f"{names[at]}.")]
            yield modules[at], max((at, *inside))


def _backward(whole: Row, modules: tuple[_Module, ...], block: int, *, recomputed: int) -> list[Step]:
    """Return a block's modules in the order of their backward. The first one that needs the recomputation waits for it."""
    by_name = {module.name: module for module in modules}
    constant = _constants(whole, modules) if block == lowest_backward(whole, recomputed) else _Constants()
    names = backward_order([module.name for module in modules[1:] if not module.name.endswith(_CHOOSES)])
    ordered = (modules[0], *(by_name[name] for name in names if name not in constant.unfollowed))
    steps, made = list[Step](), 0
    for module in ordered:
        made += 0 if module.reads_an_inner_module else _made(whole, module, by_name.get(f"{module.name}{_CHOOSES}"))
        steps.append(_begun(BACKWARD, module, block)._replace(made=made))
    for module, last in _ends([module.name for module in ordered], ordered):
        if module.name not in constant.unnoticed:
            steps[last] = steps[last]._replace(frees=(*steps[last].frees, _freed(module)))
    if block >= recomputed:
        return steps
    first = next(at for at, module in enumerate(ordered) if module.parameters and not module.reads_an_inner_module)
    if ordered[first].in_graph:
        return _run_again_after(whole, modules, ordered, steps, block)
    run_again, waiting = _recomputed(modules, block, ordered[first].name), steps[first]
    run_again, dropped = _without_frozen(whole, run_again)
    named = Freed(dropped, dropped=True, name=waiting.name)
    frees = (*waiting.frees, named) if dropped else waiting.frees
    done = run_again[-1]._replace(direction=BACKWARD, made=waiting.made, frees=frees)
    return [*steps[:first], waiting._replace(made=0, frees=()), *run_again[:-1], done, *steps[first + 1 :]]


def _made(whole: Row, module: _Module, without_backward: _Module | None) -> int:
    """Return the elements of a module's gradients, and of those of a module inside it ``without_backward``, which count too."""
    return sum(whole.trained[index] for each in (module, without_backward) if each is not None for index in each.parameters)


def _run_again_after(
    whole: Row, modules: tuple[_Module, ...], ordered: tuple[_Module, ...], steps: list[Step], block: int
) -> list[Step]:  # fmt: skip
    """Return the modules of a block whose last linear layer is in four bits without adapter, and so saves nothing.

    That layer runs its backward first. The product before it then triggers the recomputation up to itself, and its parent
    waits.
    """
    waits, down = next((at, module) for at, module in enumerate(ordered) if module.in_graph)
    names = [module.name for module in modules]
    run_again = _recomputed(modules, block, names[names.index(down.name) - 1])
    run_again, dropped = _without_frozen(whole, run_again)
    parent = down.name.rpartition(".")[0]
    last = max(at for at, module in enumerate(ordered) if module.name.startswith(f"{parent}."))
    named = Freed(dropped, dropped=True, name=steps[last].name)
    steps[last] = steps[last]._replace(frees=(*steps[last].frees, named))
    return [*steps[: waits + 1], *run_again, *steps[waits + 1 :]]


def _without_frozen(whole: Row, run_again: list[Step]) -> tuple[list[Step], tuple[int, ...]]:
    """Leave frozen parameters out of a recomputation's releases, and return them."""
    if not has_frozen(whole.model):
        return run_again, ()
    frozen = tuple(index for step in run_again for index in step.parameters if not whole.trained[index])
    kept = [step._replace(frees=tuple(_but(frozen, freed) for freed in step.frees)) for step in run_again]
    return kept, frozen


def _but(frozen: tuple[int, ...], freed: Freed) -> Freed:
    return freed._replace(parameters=tuple(index for index in freed.parameters if index not in frozen))


def _recomputed(modules: tuple[_Module, ...], block: int, last: str) -> list[Step]:
    """Return a block's modules run forward again, up to the module that waits in its backward and the modules inside it."""
    names = [module.name for module in modules]
    end = max(at for at, name in enumerate(names) if name == last or name.startswith(f"{last}."))
    saved = tuple(module._replace(viewed=module.parameters) for module in modules[1 : end + 1])
    return _forward(saved, block)


@lru_cache(maxsize=64)
def _inside(whole: Row) -> tuple[tuple[tuple[int, str], ...], ...]:
    blocks: list[list[tuple[int, str]]] = [[] for _ in range(whole.n_blocks)]
    for index, each in enumerate(whole.placed):
        if 0 <= each.block < whole.n_blocks:
            blocks[each.block].append((index, each.parameter.name))
    return tuple(tuple(block) for block in blocks)


def _modules(whole: Row, block: int) -> tuple[_Module, ...]:
    """Return a block and its modules in forward order, including those without parameters."""
    inside = _inside(whole)[block]
    owners: dict[str, list[int]] = {}
    for index, name in inside:
        owners.setdefault(name.rpartition(".")[0], []).append(index)
    of_block = tuple(owners.pop("", ())) if whole.model.profile is None else ()  # InternVL's scales
    if _CONVOLUTION in owners:
        owners[_CONVOLUTION.rpartition(".")[0]] = owners.pop(_CONVOLUTION)
    names = _names(whole, block, tuple(owners))
    if whole.model.profile is not None:
        owners = {name: [index for index, parameter in inside if _reader(parameter, names) == name] for name in names}
    leaf = whole.model.family in LEAF_FAMILIES and any(name.endswith("experts") for name in owners)
    modules = [_Module("", of_block, (inside[0][0], inside[-1][0] + 1))]
    for name in names:
        if leaf and name.startswith("mlp."):
            continue
        places = [index for index, parameter in inside if parameter.startswith(f"{name}.")]
        borrowed = owners.get(f"{name}.lora_A.default", [])
        own = places if leaf and name == "mlp" else borrowed or owners.get(name, [])
        as_they_are = whole.model.family in _EXPERTS_AS_THEY_ARE
        viewed = [] if as_they_are else [index for index in own if _is_viewed(whole.placed[index].parameter.name)]
        viewed += [
            index for index in own if whole.model.family in _TRANSPOSED and len(whole.placed[index].parameter.shape) == 2
        ]
        bounds = (places[0], places[-1] + 1) if places else (0, 0)
        read_from_outside = name.endswith(".lora_A.default")
        packed = tuple(index for index in own if whole.placed[index].parameter.quantised)
        known = name_in_a_llama(name) if block < whole.model.tower_layers else name
        modules.append(
            _Module(known, tuple(own), bounds, leaf and name == "mlp", tuple(viewed), bool(borrowed), read_from_outside, packed)
        )
    return tuple(modules)


def _is_viewed(parameter: str) -> bool:
    """Whether operators take views of a parameter: of experts, and of ``nn.MultiheadAttention``'s packed weights.

    DeepSpeed's hooks pass query, key and value as three tensors even if they are one, so it splits weight and bias (torch 2.13,
    ``nn/functional.py``, ``_in_projection_packed``).
    """
    return ".experts." in parameter or parameter.endswith((".in_proj_weight", ".in_proj_bias"))


def _names(whole: Row, block: int, owners: tuple[str, ...]) -> tuple[str, ...]:
    if whole.model.profile is None:
        return block_modules(whole.model, owners, layout(whole.model).runs[runs_in_order(whole.model)[block]].kind)
    from zeroplan.transformer.profiled import profile_of  # noqa: PLC0415  only a profile pays for it

    profile = profile_of(whole.model)
    kinds = [run.kind for run in profile.runs for _ in range(run.layers)]
    return profile.modules.kinds[kinds[block]]


def _with_linear_viewed(whole: Row, module: _Module) -> _Module:
    """Return a module whose gathered weight torch's ``linear`` saves. GPT-2's ``Conv1D`` saves the parameter instead.

    DeepSeek's router counts too, although in 16 bits it multiplies an fp32 copy: below 0.01 % of a step.
    """
    if whole.model.family == "gpt2":
        return module
    named = {index: whole.placed[index].parameter for index in module.parameters}
    weights = (index for index, parameter in named.items() if parameter.autocast and parameter.name.endswith(".weight"))
    return module._replace(viewed=tuple(sorted({*module.viewed, *weights})))


def _followed(whole: Row, modules: tuple[_Module, ...], *, at_input: bool) -> tuple[_Module, ...]:
    """Return a block's modules; those that autograd does not track have no graph node that could hold their parameters."""
    adapter = whole.model.adapter
    if at_input or adapter is None:
        return modules
    reading = reading_constants(adapter.layers, [module.name for module in modules[1:]])
    return tuple(module._replace(in_graph=()) if module.name in reading else module for module in modules)


class _Constants(NamedTuple):
    """Modules of a block that autograd does not track, and those whose end in the backward no hook sees."""

    unfollowed: frozenset[str] = frozenset()
    unnoticed: frozenset[str] = frozenset()


def _constants(whole: Row, modules: tuple[_Module, ...]) -> _Constants:
    """Return the constants of the lowest block with a backward: its input has no gradient, nor has anything before its adapters.

    Without adapters all of it is trained, and no hook sees the end of a module that reads the block's input.
    """
    adapter, names = whole.model.adapter, [module.name for module in modules[1:]]
    if adapter is None:
        return _Constants(unnoticed=frozenset(reading_the_input(names)))
    reading = reading_constants(adapter.layers, names)
    trains = {
        module.name for module in modules
        if any(whole.trained[index] for index in range(*module.inside))
    }  # fmt: skip
    return _Constants(frozenset(reading - trains), frozenset(reading & trains))
