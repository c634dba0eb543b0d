"""The parameters of a model with peft's low-rank adapters, or with frozen parts.

Source: peft 0.21, ``tuners/lora/layer.py``, ``LoraLayer.update_layer``: the linear layer becomes ``base_layer`` of its wrapper,
and ``lora_A`` (rank, in) and ``lora_B`` (out, rank) follow it. ``utils/other.py``, ``ModulesToSaveWrapper.update``: a module of
``modules_to_save`` stays as ``original_module``, frozen and unused, beside a trained copy.
"""

from collections.abc import Iterator
from itertools import product

from zeroplan.spec.adapter import FIRST, HEAD, ROUTER, SECOND, AdapterSpec, linear_layers
from zeroplan.spec.frozen import FrozenSpec
from zeroplan.spec.model import ModelSpec
from zeroplan.transformer.parameters import BlockRun, Layout, Parameter, kind_of_first
from zeroplan.transformer.params_modules import Parameters


def adapted_layout(whole: Layout, model: ModelSpec, adapter: AdapterSpec) -> Layout:
    """Return a frozen model with adapters in its blocks, and with trained copies of modules outside them.

    The first block is a kind of its own: no trained weight comes before it, so its input may have no gradient. With a
    trained embedding it is like the others. A copy of a head that is the embedding too is a tensor of its own.
    """
    kind, names, tracked = kind_of_first(model), model.linear_layers_adapted, adapter.trains("embedding")
    first = next((run for run in whole.runs if run.kind == kind), whole.runs[0])
    separate = model.has_separate_experts
    few_bits = frozenset[str]() if adapter.quantize == "none" else linear_layers(model.family, separate_experts=separate)
    runs = tuple(
        run._replace(parameters=_with_stacked(run.parameters, model, adapter))
        for old in whole.runs
        for run in _with_adapters(old, adapter, _names_in(old, model, names), few_bits, apart=old is first and not tracked)
    )
    tied = whole.tied_head
    tail = _with_copies(tuple(_wrapped(whole.tail, adapter, names, frozenset())), adapter)
    if tied is not None and adapter.trains("head"):
        tail, tied = (*tail, Parameter(_COPY.format("lm_head"), tied.shape, autocast=True)), None
    elif tied is not None and HEAD in names:
        tail = (*tail, *_matrices("lm_head", tied, adapter))
    embeddings = _with_copies(tuple(_wrapped(whole.embeddings, adapter, names, few_bits)), adapter)
    return Layout(embeddings, runs, tail, None if tied is None else tied._replace(frozen=True))


def with_adapters_of(block: Parameters, adapter: AdapterSpec, names: tuple[str, ...]) -> Parameters:
    """Return a frozen block, in 16 bits, with adapters of these linear layers."""
    return tuple(_wrapped(block, adapter, names, frozenset()))


def _names_in(run: BlockRun, model: ModelSpec, names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the layers with adapters in a run: none in a frozen text, whose layers that attend to images alone have some."""
    return () if run.kind != "cross" and model.vision is not None and model.vision.freeze_text else names


_ORIGINAL, _COPY = "{}.original_module.weight", "{}.modules_to_save.default.weight"


def _with_copies(parameters: Parameters, adapter: AdapterSpec) -> Parameters:
    """Return frozen parameters outside the blocks, with the trained copies of ``modules_to_save``."""
    made: list[Parameter] = []
    for one in parameters:
        module, _, tensor = one.name.rpartition(".")
        if tensor != "weight" or module.rpartition(".")[2] not in adapter.saved:
            made.append(one)
            continue
        made += (
            one._replace(name=_ORIGINAL.format(module), active_share=(0, 1)),
            one._replace(name=_COPY.format(module), frozen=False),
        )
    return tuple(made)


def partly_frozen_layout(whole: Layout, frozen: FrozenSpec) -> Layout:
    """Return a model with frozen parts and frozen first blocks.

    Kind ``frozen``: blocks before the first trained parameter, without backward. Kind ``first``: the first trained block, whose
    input has no gradient. Kind ``through``: frozen blocks above a trained embedding, through which gradients flow.
    """
    names, (run,) = frozen.names, whole.runs
    reached = "embedding" not in names
    below = BlockRun("through" if reached else "frozen", frozen.layers, _frozen(run.parameters))
    first = BlockRun("first", 0 if reached else 1, run.parameters)
    above = run._replace(layers=run.layers - below.layers - first.layers)
    runs = tuple(one for one in (below, first, above) if one.layers)
    embeddings = whole.embeddings if reached else _frozen(whole.embeddings)
    tied = whole.tied_head if reached or whole.tied_head is None else whole.tied_head._replace(frozen=True)
    part = {"model.norm": "norm", "lm_head": "head"}
    tail = tuple(one._replace(frozen=part[one.name.rpartition(".")[0]] in names) for one in whole.tail)
    return Layout(embeddings, runs, tail, tied)


def only_trained(whole: Layout) -> Layout:
    """Return the layout with trained parameters only. Runs of blocks stay even if they are empty."""
    runs = tuple(run._replace(parameters=_without_frozen(run.parameters)) for run in whole.runs)
    tied = whole.tied_head if whole.tied_head is not None and not whole.tied_head.frozen else None
    return Layout(_without_frozen(whole.embeddings), runs, _without_frozen(whole.tail), tied)


def only_stepped(learning: Layout, adapter: AdapterSpec | None) -> Layout:
    """Return the trained parameters that an optimizer updates: all, or those of some of prime-rl's adapters beside each layer."""
    if adapter is None or not adapter.runs:
        return learning
    runs = [
        run._replace(parameters=tuple([one for one in run.parameters if is_stepped(one, adapter)])) for run in learning.runs
    ]
    return learning._replace(runs=tuple(runs))


def is_stepped(trained: Parameter, adapter: AdapterSpec | None) -> bool:
    """Whether an optimizer updates a trained parameter: not if its adapter is beyond those that learn."""
    return adapter is None or not adapter.runs or int(trained.name.rpartition(".")[2]) < adapter.stepped


def only_frozen(whole: Layout) -> Layout:
    """Return the layout with frozen parameters only. Runs of blocks stay."""
    runs = tuple(run._replace(parameters=_frozen_of(run.parameters)) for run in whole.runs)
    return Layout(_frozen_of(whole.embeddings), runs, _frozen_of(whole.tail))


def _with_adapters(
    run: BlockRun, adapter: AdapterSpec, names: tuple[str, ...], few_bits: frozenset[str], *, apart: bool
) -> tuple[BlockRun, ...]:  # fmt: skip
    inside = tuple(_wrapped(run.parameters, adapter, names, few_bits))
    if not apart:
        return (run._replace(parameters=inside),)
    first = BlockRun("first", 1, inside)
    return (first, BlockRun(run.kind, run.layers - 1, inside)) if run.layers > 1 else (first,)


def _wrapped(
    parameters: Parameters, adapter: AdapterSpec, names: tuple[str, ...], few_bits: frozenset[str]
) -> Iterator[Parameter]:  # fmt: skip
    """Yield frozen parameters, and after each layer its adapter. ``few_bits``: the layers that are quantised."""
    for parameter, after in zip(parameters, (*parameters[1:], None), strict=False):
        module, _, tensor = parameter.name.rpartition(".")
        quantised = tensor == "weight" and module.rpartition(".")[2] in few_bits
        if adapter.quantize == "gptq" and module.endswith(".gate"):
            quantised = False  # quantised checkpoints keep a router's layer in 16 bits
        if module.rpartition(".")[2] not in names or (adapter.runs and ".shared_experts." in parameter.name):
            yield parameter._replace(frozen=True, quantised=quantised)
            continue
        yield parameter._replace(name=f"{module}.base_layer.{tensor}", frozen=True, quantised=quantised)
        if after is None or after.name.rpartition(".")[0] != module:
            weight = next(one for one in parameters if one.name == f"{module}.weight")
            yield from _matrices(module, weight, adapter)


def _with_stacked(parameters: Parameters, model: ModelSpec, adapter: AdapterSpec) -> Parameters:
    """Return the parameters with the adapters of weights of all experts, and of the router, after those of their module.

    Two wrappers around the experts are nested; the inner one has the adapter of the first weight.
    """
    stacked, made = model.stacked, list[Parameter]()
    ranks = {name: rank * adapter.rank for name, rank in ((FIRST, stacked.first), (SECOND, int(stacked.second))) if rank}
    if adapter.quantize_experts:
        return tuple(one._replace(quantised=one.quantised or _is_of_experts(one)) for one in parameters)
    inside = [one for one in parameters if ".experts." in one.name and any(stacked)]
    chosen = [(one, rank) for one in inside for name, rank in ranks.items() if one.name.endswith(name)]
    if stacked.grouped:
        return _with_grouped(parameters, stacked.grouped, transposed=model.traits.transposed)
    if stacked.runs:
        return _with_those_of_runs(parameters, adapter)
    for one in parameters:
        module, _, tensor = one.name.rpartition(".")
        is_router = stacked.router and one.name.endswith(f".{ROUTER}")
        made.append(one._replace(name=".".join((module, *_BASE * (len(chosen) if one in inside else is_router), tensor))))
        made += _matrices(module, one, adapter) if is_router else ()
        for outside, (weight, rank) in zip(range(len(chosen) - 1, -1, -1), chosen if one in inside[-1:] else (), strict=False):
            made += _of_experts(".".join((module, *_BASE * outside)), weight, rank, transposed=model.traits.transposed)
    return tuple(made)


def _with_grouped(parameters: Parameters, rank: int, *, transposed: bool) -> Parameters:
    """Return the parameters with NeMo AutoModel's adapters of all experts after the experts' own.

    Source: NeMo AutoModel 36044ad3, components/_peft/lora_experts.py, GroupedExpertsLoRA._init_adapter.
    """
    weights = [one for one in parameters if _is_of_experts(one)]
    made = list[Parameter]()
    for name, one in zip(("gate_and_up", "down"), weights, strict=False):
        experts, outputs, inputs = one.shape if not transposed else (one.shape[0], *one.shape[:0:-1])
        module = one.name.rpartition(".")[0]
        for matrix, shape in (("A", (experts, inputs, rank)), ("B", (experts, rank, outputs))):
            made.append(Parameter(f"{module}.lora_{name}_{matrix}", shape, active_share=one.active_share))
    last = max((at for at, one in enumerate(parameters) if _is_of_experts(one)), default=-1) + 1
    return (*parameters[:last], *made, *parameters[last:])


def _with_those_of_runs(parameters: Parameters, adapter: AdapterSpec) -> Parameters:
    """Return the parameters with prime-rl's adapters of all experts after the experts' own: two matrices for each weight and run.

    The first run's tokens are in the batch, so the adapters of the others get no gradients. Source: prime-rl 969df59e,
    trainer/models/layers/lora/multi_moe.py, MultiLoRAGroupedExperts.__init__.
    """
    made, last = list[Parameter](), 0
    for at, one in enumerate(parameters):
        if not _is_of_experts(one):
            continue
        last, (experts, outputs, inputs) = at + 1, one.shape
        names = ("w1", "w3") if one.name.endswith(FIRST) else ("w2",)
        for name, matrix, run in product(names, "AB", range(adapter.runs)):
            sizes = (adapter.rank, inputs) if matrix == "A" else (outputs // len(names), adapter.rank)
            share = (one.active_share[0], one.active_share[1]) if run == 0 else (0, 1)
            made.append(Parameter(f"{name}_lora_{matrix}.{run}", (experts, *sizes), active_share=share, frozen=run > 0))
    return (*parameters[:last], *made, *parameters[last:])


_BASE = ("base_layer",)


def _is_of_experts(one: Parameter) -> bool:
    return ".experts." in one.name and len(one.shape) > 2


def _of_experts(module: str, weight: Parameter, rank: int, *, transposed: bool) -> Parameters:
    """Return the two matrices of one adapter of all experts. ``ParamWrapper`` casts them itself, without autocast.

    ``transposed``: the weights have their input features first.
    """
    experts, outputs, inputs = weight.shape if not transposed else (weight.shape[0], *weight.shape[:0:-1])
    return (
        Parameter(f"{module}.lora_A.default.weight", (experts * rank, inputs), active_share=weight.active_share),
        Parameter(f"{module}.lora_B.default.weight", (outputs, experts * rank), active_share=weight.active_share),
    )


def _matrices(module: str, weight: Parameter, adapter: AdapterSpec) -> Parameters:
    """Return the matrices of a linear layer's adapter and DoRA's magnitudes, or all of prime-rl's, of which a token uses one."""
    outputs, inputs = weight.shape[::-1] if weight.transposed else weight.shape
    if adapter.runs:
        shapes = ("A", (adapter.rank, inputs)), ("B", (outputs, adapter.rank))
        return tuple(
            Parameter(f"{module}.lora_{name}.{run}", shape, autocast=True, active_share=(1, adapter.runs))
            for name, shape in shapes
            for run in range(adapter.runs)
        )
    magnitude = (Parameter(f"{module}.lora_magnitude_vector.default.weight", (outputs,)),) if adapter.dora != "none" else ()
    return (
        Parameter(f"{module}.lora_A.default.weight", (adapter.rank, inputs), autocast=True),
        Parameter(f"{module}.lora_B.default.weight", (outputs, adapter.rank), autocast=True),
        *magnitude,
    )


def _frozen(parameters: Parameters) -> Parameters:
    return tuple(parameter._replace(frozen=True) for parameter in parameters)


def _frozen_of(parameters: Parameters) -> Parameters:
    return tuple(parameter for parameter in parameters if parameter.frozen)


def _without_frozen(parameters: Parameters) -> Parameters:
    return tuple(parameter for parameter in parameters if not parameter.frozen)
