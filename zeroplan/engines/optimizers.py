"""The memory that an optimizer keeps between steps, and one step's temporaries, for the tensors that this rank updates.

Figures are those of torch 2.13 (``torch/optim``) with each optimizer's default arguments: no weight decay where it would copy
gradients (Adam, SGD, RMSprop, Adagrad), no ``amsgrad``, no ``nesterov``, one parameter group. Lion is the implementation
published with its paper, ``adamw-8bit`` is ``bitsandbytes.optim.AdamW8bit``. Gradients are in the dtype of the tensors.

A sum over tensors that no symbol of the model expresses gets a symbol of its own, a count named ``U_...``; ``counted`` reads
the counts from the lines.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, get_args

from zeroplan.engines import muon, shampoo
from zeroplan.engines.account import Symbol
from zeroplan.engines.formulas import sized
from zeroplan.engines.muon import updated_by_muon
from zeroplan.engines.published_optimizers import (
    COUNTS,
    DENOMINATORS,
    PUBLISHED,
    TORCH,
    Counting,
    Held,
    Needs,
    beside_matrices,
    elements,
    of_matrices,
    of_vectors,
)
from zeroplan.errors import SpecError
from zeroplan.ledger import Kind, Line
from zeroplan.memo import Computed
from zeroplan.numeric import Int, added_up, maximum, weighted, where
from zeroplan.spec.recipe import Optimizer, OptimizerImpl, RecipeSpec
from zeroplan.transformer.parameters import Layout


class LocalTensor(NamedTuple):
    """One tensor that this rank updates, or ``repeat`` identical ones.

    Tensors come in the order of the parameter group; neighbours with the same ``repeat`` above 1 form a block that occurs that
    many times, one after the other. ``in_block`` is False outside the transformer blocks (embedding, head), which Muon leaves
    to AdamW.
    """

    shape: tuple[Int, ...]
    repeat: int = 1
    in_block: bool = True
    may_be_empty: bool = False
    """A tensor without elements on this rank has no gradient and so no state (FSDP1's views of original parameters)."""
    ranks: Int = 1
    """Ranks that shard its rows as torch's DTensor does."""
    rows: Int | None = None
    """Rows of all ranks together."""
    replicas: Int = 1
    """Groups of these ranks, each with a whole tensor, if torch's DTensor shares work among them (Muon)."""

    @property
    def numel(self) -> Int:
        """Elements of one such tensor."""
        product: Int = 1
        for size in self.shape:
            product = product * size
        return product


def whole_tensors(tree: Layout) -> tuple[LocalTensor, ...]:
    """Return all parameters of a layout as whole tensors. Equal blocks appear once, with their number."""
    return (
        *(LocalTensor(one.shape, in_block=False) for one in tree.embeddings),
        *(LocalTensor(one.shape, run.layers) for run in tree.runs for one in run.parameters),
        *(LocalTensor(one.shape, in_block=False) for one in tree.tail),
    )


def _factors(tensor: LocalTensor) -> Int:
    """Return the elements of Adafactor's two variance factors: without the last dimension, and without the second last."""
    if len(tensor.shape) < 2:
        return 0
    *leading, rows, columns = tensor.shape
    return LocalTensor(tuple(leading)).numel * (rows + columns)


def _adafactors_step(tensors: Sequence[LocalTensor], element_bytes: int) -> Int:
    """Return the largest temporaries of one tensor's update. [bytes]

    Alive together: the variance estimates of this tensor and of the previous one, this tensor's means or square, and the means
    of the last matrix or the square of the last vector, which variables still hold.
    """
    largest: Int = 0
    means: Int = 0
    square: Int = 0
    for previous, tensor in _with_previous(tensors):
        if len(tensor.shape) > 1:
            means = _factors(tensor)
        else:
            square = tensor.numel
        largest = maximum(largest, previous + tensor.numel + means + square)
    return element_bytes * largest


_EVERY: tuple[OptimizerImpl, ...] = ("foreach", "fused", "forloop")
_BOTH: tuple[OptimizerImpl, ...] = ("foreach", "forloop")
_AND_SCALED = 2, "foreach step: denominators and scaled gradients of all updates at once"
_ADAFACTOR = "torch 2.13, torch/optim/_adafactor.py"


def _torchs(
    implementations: tuple[OptimizerImpl, ...], states: tuple[str, ...] = (), foreach: tuple[int, str] = (0, ""),
    forloop: tuple[int, int] = (0, 0),
) -> Needs:  # fmt: skip
    """Return an optimizer of torch whose states have one element per parameter."""
    held = tuple(Held(state, "U", elements) for state in states)
    return Needs(held, TORCH, implementations=implementations, foreach=foreach, forloop=forloop)


_STEPS: dict[Optimizer, Needs] = {
    "adamw": _torchs(_EVERY, ("momentum", "variance"), DENOMINATORS, (1, 2)),
    "adam": _torchs(_EVERY, ("momentum", "variance"), DENOMINATORS, (1, 2)),
    "sgd": _torchs(_EVERY),
    "sgd-momentum": _torchs(_EVERY, ("momentum",)),
    "adagrad": _torchs(_EVERY, ("sum of squares",), _AND_SCALED, (1, 1)),
    "rmsprop": _torchs(_BOTH, ("mean square",), DENOMINATORS, (1, 1)),
    "adafactor": Needs(
        (
            Held("row and column factors of the matrices' variance", "U_f", _factors),
            Held("variance of the vectors", "U_v", of_vectors),
        ),
        f"{_ADAFACTOR}, _init_group and _multi_tensor_adafactor", scratch_source=f"{_ADAFACTOR}, _single_tensor_adafactor",
        together=_adafactors_step,
        reason="for-loop step: variance estimates of two tensors in turn", implementations=("forloop", "foreach"),
        foreach=(1, "foreach step: variance estimates of all updates at once"),
    ),
    "lion": _torchs(("forloop",), ("momentum",), forloop=(1, 3)),
    "muon": Needs(
        (
            Held("Muon's momentum of the blocks' matrices", "U_m", of_matrices),
            Held("AdamW's momentum and variance of all other tensors", "U_o", beside_matrices, alike=2),
        ),
        "torch 2.13, torch/optim/_muon.py and adam.py, _init_group", scratch_source=muon.SOURCE, together=muon.highest_of,
        reason="step: Newton-Schulz iterates of one matrix, or AdamW's denominators",
    ),
}  # fmt: skip
"""torch's optimizers. Lion is the implementation published with its paper."""


def needs_of(optimizer: Optimizer) -> Needs:
    """Return what an optimizer keeps and what its step allocates."""
    return PUBLISHED[optimizer] if optimizer in PUBLISHED else _STEPS[optimizer]


#: Implementations that each optimizer has on CUDA, the default first.
IMPLEMENTATIONS: dict[Optimizer, tuple[OptimizerImpl, ...]] = {
    one: needs_of(one).implementations for one in get_args(Optimizer)
}

#: Optimizers whose fused kernel keeps its step counters on the GPU.
_STEP_ON_GPU: tuple[Optimizer, ...] = ("adamw", "adam", "adagrad")


def counted(*lines: Line) -> tuple[Symbol, ...]:
    """Return the symbols in the formulas of these lines, with their values.

    >>> counted(*state_lines("adamw", "fused", (LocalTensor((64, 32)),), 4))[-1]
    Symbol(name='U_n', value=1, meaning='tensors that this rank updates')
    """
    symbols: dict[str, Symbol] = {}
    for line in lines:
        width, _, name = line.formula.partition("·")
        if name in COUNTS and name not in symbols:
            symbols[name] = Symbol(name, line.n_bytes // int(width), COUNTS[name])
    return tuple(symbols.values())


def implementation(optimizer: Optimizer, impl: OptimizerImpl | None, *, on_host: bool = False) -> OptimizerImpl:
    """Return the implementation of the step: the requested one, else torch's default on CUDA; on the host a loop over tensors.

    Raises SpecError if the optimizer has no such implementation. Source: torch 2.13, ``_default_to_fused_or_foreach`` and each
    optimizer's functional entry point.

    >>> implementation("adamw", None), implementation("adafactor", None)
    ('foreach', 'forloop')
    """
    offered = IMPLEMENTATIONS[optimizer]
    if impl is None:
        return "forloop" if on_host and "forloop" in offered else offered[0]
    if impl not in offered:
        raise SpecError(f"optimizer {optimizer!r} has no {impl} implementation; use {' or '.join(offered)}")
    return impl


_FUSED = "torch has no DTensor strategy for its fused kernel"
_NORM = "it squares a norm over shards in place, which DTensor refuses"
_BNB = "bitsandbytes gives its kernel DTensors and plain tensors together, which torch refuses"

#: Steps that raise over FSDP2's DTensors, whatever the device. Read and run with torch 2.13, and read in 2.11.0, 2.14.1 and
#: 2.15.0: ``torch/distributed/tensor/_ops/_pointwise_ops.py`` (the fused ops), ``_ops/utils.py`` (in-place operations) and
#: ``torch/optim/_adafactor.py``; bitsandbytes 0.50.2, ``functional.py``, ``optimizer_update_8bit_blockwise``.
RAISES_ON_DTENSORS: dict[tuple[Optimizer, OptimizerImpl], str] = {
    ("sgd", "fused"): _FUSED, ("sgd-momentum", "fused"): _FUSED, ("adagrad", "fused"): _FUSED,
    ("adafactor", "forloop"): _NORM, ("adafactor", "foreach"): _NORM, ("adamw-8bit", "fused"): _BNB,
    ("lion-8bit", "fused"): _BNB, ("lion-32bit", "fused"): _FUSED, ("ademamix-8bit", "fused"): _BNB,
    ("ademamix-32bit", "fused"): _FUSED, ("rmsprop-8bit", "fused"): _BNB, ("rmsprop-32bit", "fused"): _FUSED,
}  # fmt: skip


def check_on_dtensors(optimizer: Optimizer, impl: OptimizerImpl) -> None:
    """Raise SpecError if the optimizer cannot step on DTensors, the type of FSDP2's parameters.

    >>> check_on_dtensors("sgd", "fused")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    zeroplan.errors.SpecError: optimizer 'sgd' (fused) fails under engine 'fsdp2': ...; use its foreach implementation
    """
    reason = RAISES_ON_DTENSORS.get((optimizer, impl))
    if reason is None:
        return
    others = [one for one in IMPLEMENTATIONS[optimizer] if (optimizer, one) not in RAISES_ON_DTENSORS]
    instead = f"its {others[0]} implementation" if others else "adamw, or engine 'ddp' or 'deepspeed'"
    raise SpecError(f"optimizer {optimizer!r} ({impl}) fails under engine 'fsdp2': {reason}; use {instead}")


def implementation_of(recipe: RecipeSpec) -> OptimizerImpl:
    """Return the implementation of the step under this recipe: the requested one, else the engine's default.

    Raises SpecError if the engine cannot run it.

    >>> implementation_of(RecipeSpec()), implementation_of(RecipeSpec(engine="deepspeed"))
    ('foreach', 'fused')
    """
    if recipe.engine == "megatron":
        return "fused"
    if recipe.engine == "deepspeed":
        from zeroplan.engines.deepspeed import optimizer_impl  # noqa: PLC0415  keeps start-up fast

        return optimizer_impl(recipe)
    check_engine(recipe)
    impl = implementation(recipe.optimizer, recipe.optimizer_impl, on_host=recipe.offloads_states)
    if recipe.engine == "fsdp2":
        check_on_dtensors(recipe.optimizer, impl)
    return impl


def check_engine(recipe: RecipeSpec) -> None:
    """Raise SpecError if an optimizer of another package is not modelled under the recipe's engine.

    >>> check_engine(RecipeSpec(engine="deepspeed", optimizer="apollo"))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    zeroplan.errors.SpecError: optimizer 'apollo' with engine 'deepspeed' is not modelled; use engine 'ddp' or optimizer 'adamw'
    """
    one = PUBLISHED.get(recipe.optimizer)
    if one is None or recipe.optimizer == "adamw-8bit":
        return
    if recipe.engine not in one.engines:
        engines = " or ".join(repr(engine) for engine in one.engines if engine != "paper")
        unpaged = recipe.optimizer.removeprefix("paged-")
        other = unpaged if unpaged in set(PUBLISHED) - {recipe.optimizer} and recipe.engine != "fsdp2" else "adamw"
        raise SpecError(
            f"optimizer {recipe.optimizer!r} with engine {recipe.engine!r} is not modelled; use engine {engines} or optimizer "
            f"{other!r}"
        )
    if recipe.engine == "ddp" and recipe.zero_stage == 1 and recipe.optimizer not in shampoo.LONGEST:
        raise SpecError(f"optimizer {recipe.optimizer!r} inside ZeroRedundancyOptimizer is not modelled; use stage 0")
    if recipe.offloads_states:
        raise SpecError(f"optimizer {recipe.optimizer!r} in host memory is not modelled; use optimizer 'adamw'")


def state_lines(
    optimizer: Optimizer,
    impl: OptimizerImpl,
    tensors: Sequence[LocalTensor],
    element_bytes: int,
    *,
    symbol: str = "U",
) -> tuple[Line, ...]:
    """Return the states that the optimizer keeps between steps on this rank. [bytes]

    ``symbol`` names the updated elements in the formula (``Ψ``), by default as ``counted`` has them. Leaves out step counters in
    host memory (4 B per tensor with foreach and for-loop). Source: torch 2.13, ``torch/optim``, each optimizer's ``_init_group``.

    >>> [line.n_bytes for line in state_lines("adamw", "foreach", (LocalTensor((64, 32)),), 4)]
    [8192, 8192]
    """
    one = needs_of(optimizer)
    lines = list(_held_lines(one, one.states, tensors, element_bytes, symbol))
    if one.tables:
        scales = next(line.n_bytes for line in lines if line.formula.endswith("U_256"))
        there = where(scales > 0, one.tables, 0)
        lines.append(Line(Kind.OPTIMIZER_STATE, there, "quantization maps", f"{one.tables}·min(1, U_256)", one.source))
    if one.shared is not None:
        lines.append(sized(Kind.OPTIMIZER_STATE, 8, one.shared(tensors), shampoo.PAIRS, shampoo.INDICES, "U_x"))
    count = added_up(
        [where(tensor.numel > 0, tensor.repeat, 0) if tensor.may_be_empty else tensor.repeat for tensor in tensors]
    )
    return (*lines, *step_counters(optimizer, impl, count))


def managed_lines(optimizer: Optimizer, tensors: Sequence[LocalTensor], element_bytes: int = 4) -> tuple[Line, ...]:
    """Return the states in managed memory, which CUDA migrates between host and GPU, or in host memory. [bytes]

    >>> [line.n_bytes for line in managed_lines("paged-adamw-32bit", (LocalTensor((1000, 200)), LocalTensor((200,))))]
    [1600000]
    """
    one = needs_of(optimizer)
    return tuple(_held_lines(one, one.paged, tensors, element_bytes, "U_p"))


def _held_lines(
    one: Needs, states: tuple[Held, ...], tensors: Sequence[LocalTensor], element_bytes: int, symbol: str
) -> Iterator[Line]:
    repeats = [tensor.repeat for tensor in tensors]
    counted = Computed[Counting, Int](lambda count: weighted(repeats, map(count, tensors)))
    for held in states:
        units = counted[held.narrow if held.narrow is not None and element_bytes == 2 else held.units]
        width = held.width or held.alike * element_bytes
        named = symbol if held.symbol == "U" else held.symbol
        yield sized(Kind.OPTIMIZER_STATE, width, units, held.what, one.source, named)


def step_temporary_lines(
    optimizer: Optimizer,
    impl: OptimizerImpl,
    tensors: Sequence[LocalTensor],
    element_bytes: int,
    *,
    symbol: str = "U",
) -> tuple[Line, ...]:
    """Return the temporaries of ``optimizer.step()`` at their peak. [bytes]

    Leaves out scalars and the kernels' argument blocks. Source: torch 2.13, ``torch/optim``, each optimizer's
    ``_multi_tensor_*`` and ``_single_tensor_*``; fused kernels write in place.

    >>> [line.n_bytes for line in step_temporary_lines("adamw", "foreach", (LocalTensor((64, 32)),), 4)]
    [8192]
    """
    one = needs_of(optimizer)
    if impl == "foreach":
        copies, reason = one.foreach
        width, updated = copies * element_bytes, total_elements(tensors)
        return (sized(Kind.OPTIMIZER_TEMPORARY, width, updated, reason, one.source, symbol),) if copies else ()
    if one.together is not None:
        most = one.together(tensors, element_bytes)
        return (Line(Kind.OPTIMIZER_TEMPORARY, most, one.reason or "step of all tensors", "1·U_z", one.scratch_source),)
    if one.scratch is not None:
        largest = 0 * total_elements(tensors)
        for group in _groups(optimizer, tensors):
            for before, tensor in _with_previous(group):
                largest = maximum(largest, one.scratch(tensor, before, element_bytes))
        return (Line(Kind.OPTIMIZER_TEMPORARY, largest, "step of one tensor in turn", "1·U_z", one.scratch_source),)
    previous, current = one.forloop
    if impl == "fused" or not current:
        return ()
    largest = maximum(0, *(previous * before + current * tensor.numel for before, tensor in _with_previous(tensors)))
    reason = "for-loop step: temporaries of two tensors in turn"
    return (sized(Kind.OPTIMIZER_TEMPORARY, element_bytes, largest, reason, one.source, "U_t"),)


def total_elements(tensors: Sequence[LocalTensor]) -> Int:
    """Return the elements of all tensors together."""
    return added_up([tensor.repeat * tensor.numel for tensor in tensors])


def step_counters(optimizer: Optimizer, impl: OptimizerImpl, count: Int) -> tuple[Line, ...]:
    """Return the step counters of this many tensors, if they are on the GPU. [bytes]

    >>> [line.n_bytes for line in step_counters("adamw", "fused", 3)], step_counters("adamw", "foreach", 3)
    ([12], ())
    """
    if impl != "fused" or optimizer not in _STEP_ON_GPU:
        return ()
    reason = "step counters on the GPU, one per tensor (the allocator rounds each to a block of 512)"
    return (sized(Kind.OPTIMIZER_STATE, 4, count, reason, TORCH, "U_n"),)


def foreach_copies(optimizer: Optimizer, impl: OptimizerImpl) -> int:
    """Return how many lists of temporaries a foreach step makes, with one temporary per tensor; 0 for other steps."""
    return needs_of(optimizer).foreach[0] if impl == "foreach" else 0


def states_from_the_start(optimizer: Optimizer) -> bool:
    """Whether the optimizer makes its states in its constructor, not in its first step (torch 2.13, optim/adagrad.py)."""
    return optimizer == "adagrad"


def _groups(optimizer: Optimizer, tensors: Sequence[LocalTensor]) -> tuple[Sequence[LocalTensor], ...]:
    """Return the tensors in the groups that the Trainer makes; GrokAdamW's also as one group."""
    if optimizer in ("apollo", "galore"):
        matrices = [tensor for tensor in tensors if updated_by_muon(tensor)]
        return [tensor for tensor in tensors if not updated_by_muon(tensor)], matrices
    return (tensors, [tensor for tensor in tensors if len(tensor.shape) > 1]) if optimizer == "grokadamw" else (tensors,)


def _with_previous(tensors: Sequence[LocalTensor]) -> list[tuple[Int, LocalTensor]]:
    """Return each tensor with the elements of the one before; the first of a repeated block also follows the block's last."""
    pairs: list[tuple[Int, LocalTensor]] = []
    before: Int = 0
    for index, tensor in enumerate(tensors):
        pairs.append((before, tensor))
        before = where(tensor.numel > 0, tensor.numel, before) if tensor.may_be_empty else tensor.numel
        ends_block = index + 1 == len(tensors) or tensors[index + 1].repeat != tensor.repeat
        if tensor.repeat > 1 and ends_block:
            pairs.append((before, _first_of_block(tensors, index)))
    return pairs


def _first_of_block(tensors: Sequence[LocalTensor], last: int) -> LocalTensor:
    first = last
    while first and tensors[first - 1].repeat == tensors[last].repeat:
        first -= 1
    return tensors[first]
