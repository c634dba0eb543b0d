"""The flat parameters of FSDP1's units, their shards, and the plan of a step.

A unit's parameters are consecutive in one flat parameter (torch 2.13, torch/distributed/fsdp/_flat_param.py,
``FlatParamHandle``). With ``use_orig_params`` each begins at a multiple of 16 bytes, and the flat parameter includes the last
shard's padding. Otherwise the reduction adds that padding.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import combinations, pairwise

from zeroplan.engines.account import Symbol
from zeroplan.engines.formulas import blocks_sum, sized
from zeroplan.engines.fsdp2.groups import Cut, Group, cut_of
from zeroplan.engines.fsdp2.plan import Plan, plan_of, sum_of
from zeroplan.engines.optimizers import LocalTensor
from zeroplan.engines.pinned import rounding
from zeroplan.engines.precisions import widths
from zeroplan.engines.sources import ACCUMULATE
from zeroplan.ledger import Kind, Line, total_bytes
from zeroplan.numeric import Int, added_up, ceil_div, maximum, minimum, weighted
from zeroplan.spec.batch import Batch
from zeroplan.spec.mesh import Mesh
from zeroplan.spec.model import ModelSpec
from zeroplan.spec.recipe import Fsdp1Options, Fsdp2Options, RecipeSpec
from zeroplan.transformer.parameters import Layout, Parameter
from zeroplan.transformer.recomputed import first_recomputed
from zeroplan.transformer.vision import pixels

_CPU_GRAD = "torch 2.13, torch/distributed/fsdp/_flat_param.py, FlatParamHandle.init_flat_param_attributes"
_WRITTEN_BACK = "torch 2.13, torch/distributed/fsdp/_flat_param.py, FlatParamHandle._writeback_orig_params"
_VIEWED = "torch 2.13, torch/distributed/fsdp/_flat_param.py, FlatParamHandle.flat_param_to"
_ALIGNED_BYTES = 16  # torch 2.13, _flat_param.py, _get_aligned_numel


class FlatPlan(Plan):
    """The inputs of an FSDP1 step's moments: FSDP2's plan, with flat parameters as groups."""

    __slots__ = ()

    @property
    def options(self) -> Fsdp1Options:
        """FSDP1's own options."""
        return self.recipe.fsdp1

    @property
    def backward_prefetch(self) -> str:
        """When the backward prefetches the next block. A unit that a checkpoint calls is unknown until its recomputation."""
        return "no_prefetch" if self.options.checkpoints_units else self.options.backward_prefetch

    @property
    def adds_up(self) -> bool:
        """Whether autograd accumulates single gradients: never, since it accumulates only flat ones."""
        return False

    @property
    def letter(self) -> str:
        """The letter of a flat parameter in formulas: ``P`` with its padding, ``G`` without."""
        return "P" if self.options.use_orig_params else "G"

    @property
    def earlier(self) -> str:
        """The symbol of ``several`` in formulas."""
        return "M"

    @property
    def gathered_blocks(self) -> tuple[tuple[Group, ...], tuple[str, ...]]:
        """The groups that a block's all-gathers collect. Ignored adapters are whole on every rank, so they are none of them."""
        if not self.options.ignores_adapters:
            return super().gathered_blocks
        frozen = frozen_units(self)
        return frozen, tuple(group.symbol for group in frozen)

    def gradient_shards(self, layers: tuple[int, ...], when: str, outside: tuple[Group, ...] = ()) -> Line:
        """Return this rank's gradient shards of these layers. Offloaded ones stay on the GPU until the backward ends. [bytes]

        Source: torch 2.13, _runtime_utils.py, ``_accumulate_sharded_grad``; _flat_param.py, ``prepare_gradient_for_optim``.
        """
        return self.reduced_gradients(layers, when, outside)

    @property
    def adds_shards(self) -> bool:
        """Whether a reduction's result is added to the shard of earlier micro-batches, which offload leaves in host memory."""
        return super().adds_shards and not self.offloaded

    @property
    def beyond_pinned_bytes(self) -> Int:
        """Size of pinned blocks beyond each unit's shard and its gradient. [bytes]

        Source: torch 2.13, _flat_param.py, ``init_flat_param_attributes``.
        """
        width = self.frozen_width if self.is_partly_frozen else self.width.stored
        units = [(group, layers, width) for group, layers in self._whole_units]
        for run, layers in enumerate(self.every_layer if self.is_partly_frozen else ()):
            units += [(unit, layers, self.width.stored) for unit in adapter_units(self, run)]
        return added_up(2 * layers * rounding(each * group.shard) for group, layers, each in units if self.offloaded)

    @property
    def _whole_units(self) -> tuple[tuple[Group, int], ...]:
        """The root and every run's blocks, without adapters, and how many there are of each."""
        blocks = frozen_units(self) if self.is_partly_frozen else self.blocks
        return ((self.root, 1), *zip(blocks, self.every_layer, strict=True))

    def unused_gradients(self) -> Line:
        """Return the gradients that FSDP1 allocates in host memory for frozen units, too, and never writes. [bytes]"""
        reason = "gradients of frozen units, allocated in host memory and not used"
        n_bytes = self.frozen_width * added_up(layers * group.shard for group, layers in self._whole_units)
        return sized(Kind.GRADIENTS, 1, n_bytes, reason, _CPU_GRAD)

    def written_back(self, temporaries: tuple[Line, ...]) -> tuple[tuple[Line, ...], tuple[Symbol, ...]]:
        """Return the host memory that writing gradients back needs beyond the optimizer's temporaries, and its symbol. [bytes]

        At stage 3 the original parameters' gradients view the shard in host memory after the forward, while the flat parameter
        has none. The backward's gather therefore makes it a new one, and frees it when the unit's backward begins.
        """
        if not (self.offloaded and self.options.use_orig_params) or self.reshard is False:
            return (), ()
        more = maximum(self.width.stored * self._shards_written_at_once - total_bytes(temporaries), 0)
        reason = "gradients that a gather in the backward writes back, beyond the optimizer's temporaries"
        line = Line(Kind.TEMPORARY, more, reason, "1·H_w", _WRITTEN_BACK)
        return (line,), (Symbol("H_w", more, "bytes of gradients written back, beyond the optimizer's temporaries"),)

    @property
    def _shards_written_at_once(self) -> Int:
        """Return the most elements of shards that are written back together: of one unit and of the prefetched one. [elements]

        A recomputation gathers all adapters of its block before the backward of the first.
        """
        prefetches = self.backward_prefetch == "backward_pre"
        if self.is_partly_frozen:
            units = [[unit.shard for unit in adapter_units(self, run)] for run in range(len(self.runs))]
            if self.recomputed:
                return _largest([added_up(block) for block in units])
            return _largest([one + after * prefetches for block in units for one, after in pairwise((*block, *block[:1]))])
        blocks = [(group.shard, layers) for group, layers in zip(self.blocks, self.every_layer, strict=True)]
        alone = [self.root.shard, *(shard for shard, _ in blocks)]
        if not prefetches:
            return _largest(alone)
        twice = [2 * shard for shard, layers in blocks if layers > 1]
        return _largest([*twice, *(one + other for one, other in combinations(alone, 2))])

    @property
    def views_shards(self) -> bool:
        """Whether a shard from host memory stays on the GPU while its unit is unsharded: uncast, the original parameters view it.

        Source: torch 2.13, _flat_param.py, ``flat_param_to``. A frozen shard has the compute dtype already.
        """
        return self.offloaded and self.options.use_orig_params and (self.is_partly_frozen or not self.width.mixed)

    def shards_viewed(self, layers: tuple[int, ...]) -> tuple[Line, ...]:
        """Return such shards of blocks that stay unsharded. [bytes]"""
        if not self.views_shards:
            return ()
        groups, width = frozen_units(self) if self.width.mixed else self.blocks, self.width.compute
        shards: Int = sum(count * group.shard for count, group in zip(layers, groups, strict=True))
        letters = " + ".join(f"{count}·P_{group.symbol}/N" for count, group in zip(layers, groups, strict=True))
        reason = "shards of these blocks, copied from the host"
        return (sized(Kind.GATHER, width, shards, reason, _VIEWED, f"({letters})"),)

    def flat(self, group: Group) -> Int:
        """Return the elements of a unit's flat parameter, and so of its flat gradient. [elements]"""
        return group.padded if self.options.use_orig_params else group.numel

    def left_behind(self, layers: tuple[int, ...], outside: tuple[Group, ...] = ()) -> tuple[Line, ...]:
        """Return flat gradients of earlier micro-batches (``no_sync``) in units that are not reduced yet. [bytes]"""
        if self.recipe.sync_every_micro_batch:
            return ()
        elements = sum(map(self.flat, outside)) + weighted(layers, map(self.flat, self.trained_blocks))
        width = self.width.compute
        elements_of = blocks_sum(self.letter, layers, self.trained_kinds, sum_of(self.letter, outside))
        reason = "flat gradients accumulated by earlier micro-batches"
        n_bytes, formula = self.several * width * elements, f"{width}·{self.earlier}·({elements_of})"
        return (Line(Kind.UNSHARDED_GRADIENTS, n_bytes, reason, formula, ACCUMULATE),)


class EarlierPlan(FlatPlan):
    """The same for a micro-batch before the last. It finds gradients if at least two are before the last."""

    __slots__ = ()

    @property
    def earlier(self) -> str:
        """The symbol of ``several`` in formulas."""
        return "M_2"


def flat_plan(model: ModelSpec, recipe: RecipeSpec, mesh: Mesh, batch: Batch) -> FlatPlan:
    """Return the plan of a job, with a flat parameter per unit; ``batch`` is one rank's."""
    recipe = replace(recipe, fsdp2=Fsdp2Options(reduce_dtype=recipe.fsdp1.reduce_dtype, cpu_offload=recipe.fsdp1.cpu_offload))
    width, n = widths(recipe.precision), mesh.dp_shard
    aligned = aligned_to(recipe)
    cut = cut_of(model, width, n, part=None, first=first_recomputed(model, recipe), tp=1, ep=1, ends_apart=False)
    whole = recipe.fsdp1.ignores_adapters
    cut = _flattened(cut, n, aligned, whole=whole)
    tensors = tuple(_local_tensors(cut, n, aligned, views=recipe.fsdp1.use_orig_params, whole=whole))
    beside_adapters = model.vision is None or model.adapter is not None
    # peft casts an input to the dtype that it finds at an adapter's matrix: fp32 of this rank's shard, but in 16 bits if the matrix
    # is not an original parameter, since torch leaves the view of the last unsharded flat parameter there.
    found_wide = recipe.fsdp1.use_orig_params or whole or model.adapter is None
    autocast = width.mixed and cut.is_partly_frozen and not model.is_quantised and beside_adapters and found_wide
    updated = "U" if recipe.fsdp1.use_orig_params else None  # the optimizer does not update the gaps between aligned parameters
    plan = FlatPlan(*plan_of(cut, tensors, (), model, recipe, mesh, batch, autocast=autocast, updated=updated))
    if plan.offloaded and plan.is_partly_frozen:
        plan = plan._replace(in_host_memory=(*plan.in_host_memory, plan.unused_gradients()))
    if model.vision is None or not width.mixed:
        return plan
    # The vision tower casts pixels to the dtype of its parameters (fp32 in a flat one) and back, so there are two copies.
    twice = pixels(model, batch, width.compute, "pixels in the compute dtype, as the model's forward got them")
    return plan._replace(head=plan.head._replace(loss_forward=(*plan.head.loss_forward, *twice)))


def _largest(numbers: Sequence[Int]) -> Int:
    return maximum(0, *numbers)


def _flattened(cut: Cut, n: Int, aligned: int, *, whole: bool) -> Cut:
    """Return the same units, each as one flat parameter; each adapter matrix is sharded, or ``whole`` on every rank."""
    root, *blocks = (flat_group(parameters, n, symbol, aligned) for parameters, symbol in _units(cut.tree, "root"))
    if not cut.is_partly_frozen:
        return cut._replace(root=root, trained_root=root, blocks=(here := tuple(blocks)), trained_blocks=here)
    trained = tuple(_together(_each(run.parameters, n, whole=whole), f"trained_{run.name}") for run in cut.learning.runs)
    frozen = (flat_group(_frozen(run.parameters), n, run.name, aligned) for run in cut.tree.runs)
    both = tuple(_together(pair, one.symbol) for pair, one in zip(zip(frozen, trained, strict=True), cut.blocks, strict=True))
    return cut._replace(root=root, trained_root=_together((), "trained_root"), blocks=both, trained_blocks=trained)


def _frozen(parameters: tuple[Parameter, ...]) -> tuple[Parameter, ...]:
    return tuple(parameter for parameter in parameters if parameter.frozen)


def _each(parameters: tuple[Parameter, ...], n: Int, *, whole: bool) -> tuple[Group, ...]:
    """Return each parameter as a unit. ``whole``: every rank has all of it, so all ranks together have it n times."""
    if whole:
        return tuple(Group(one.numel, one.numel * n, one.numel, "adapter") for one in parameters)
    return tuple(flat_group((parameter,), n, "adapter", 1) for parameter in parameters)


def _together(groups: tuple[Group, ...], symbol: str) -> Group:
    shard, padded = added_up(one.shard for one in groups), added_up(one.padded for one in groups)
    return Group(shard, padded, sum(one.numel for one in groups), symbol)


def frozen_units(plan: FlatPlan) -> tuple[Group, ...]:
    """Return the frozen parameters of each run's blocks, as one flat parameter."""
    aligned = aligned_to(plan.recipe)
    return tuple(flat_group(_frozen(run.parameters), plan.n, f"frozen_{run.name}", aligned) for run in plan.runs)


def adapter_units(plan: FlatPlan, run: int) -> tuple[Group, ...]:
    """Return the matrices of a block's adapters, each as a unit."""
    parameters = tuple(parameter for parameter in plan.runs[run].parameters if not parameter.frozen)
    return _each(parameters, plan.n, whole=plan.options.ignores_adapters)


def aligned_to(recipe: RecipeSpec) -> int:
    """Return the alignment of parameters in a flat parameter. [elements]"""
    return _ALIGNED_BYTES // widths(recipe.precision).compute if recipe.fsdp1.use_orig_params else 1


def _units(tree: Layout, root: str) -> Iterator[tuple[tuple[Parameter, ...], str]]:
    yield (*tree.embeddings, *tree.tail), root
    for run in tree.runs:
        yield run.parameters, run.name


def flat_group(parameters: tuple[Parameter, ...], n: Int, symbol: str, aligned: int) -> Group:
    """Return one unit of these parameters, flattened and split into ``n`` shards."""
    *_, end = _offsets(parameters, aligned)
    shard = ceil_div(end, n)
    return Group(shard, shard * n, sum(parameter.numel for parameter in parameters), symbol)


@lru_cache(maxsize=1024)
def _offsets(parameters: tuple[Parameter, ...], aligned: int) -> tuple[int, ...]:
    """Return the start of each parameter in the flat one, and the end of the last."""
    offsets, end = [], 0
    for parameter in parameters:
        offsets.append(-(-end // aligned) * aligned)
        end = offsets[-1] + parameter.numel
    return (*offsets, end)


def _local_tensors(cut: Cut, n: Int, aligned: int, *, views: bool, whole: bool) -> Iterator[LocalTensor]:
    """Yield the tensors that rank 0 updates: its flat shard of each unit, or views of each parameter's part in it."""
    if cut.is_partly_frozen:
        for run in cut.learning.runs:
            yield from (LocalTensor((unit.shard,), run.layers) for unit in _each(run.parameters, n, whole=whole))
        return
    root, *blocks = _units(cut.tree, "root")
    for (parameters, _), group, repeat in (
        (root, cut.root, 1), *((one, group, run.layers) for one, group, run in zip(blocks, cut.blocks, cut.tree.runs, strict=True)),
    ):  # fmt: skip
        if not views:
            yield LocalTensor((group.shard,), repeat)
            continue
        for here in views_of(parameters, group, aligned):
            if not isinstance(here, int) or here:
                yield LocalTensor((here,), repeat, may_be_empty=True)


def views_of(parameters: tuple[Parameter, ...], group: Group, aligned: int) -> Iterator[Int]:
    """Yield the elements of each parameter of a unit in rank 0's shard. [elements]"""
    for parameter, offset in zip(parameters, _offsets(parameters, aligned), strict=False):
        yield minimum(maximum(group.shard - offset, 0), parameter.numel)
