"""The inputs of an FSDP2 step's moments: groups and their sizes, element widths, passes through blocks and head."""

from functools import lru_cache
from typing import Any, NamedTuple

from zeroplan.engines.formulas import blocks_sum, product
from zeroplan.engines.fsdp2.groups import Cut, Ends, Group, cut_of, local_tensors, on_host, parameter_lines, shards_of
from zeroplan.engines.optimizers import LocalTensor, implementation_of, state_lines, step_temporary_lines
from zeroplan.engines.outside import held_beside, outside, recompute_of, run_pass
from zeroplan.engines.pinned import rounding
from zeroplan.engines.positions import Position, corners, walk
from zeroplan.engines.precisions import Widths, compute_of, widths
from zeroplan.ledger import Kind, Line, total_bytes
from zeroplan.numeric import Int, added_up, maximum, weighted, where
from zeroplan.spec.batch import Batch
from zeroplan.spec.mesh import Mesh
from zeroplan.spec.model import PREDICTS, ModelSpec
from zeroplan.spec.recipe import SENDING, OptimizerImpl, RecipeSpec, Recompute
from zeroplan.transformer.blocks import AtEmbedding, BlockPass, Compute, HeadPass
from zeroplan.transformer.buffers import held_buffers, tables_in_layers
from zeroplan.transformer.parameters import BlockRun, Layout, Parameter
from zeroplan.transformer.params_adapted import only_frozen, only_stepped
from zeroplan.transformer.recomputed import first_recomputed
from zeroplan.transformer.vision import BESIDE_THE_TEXT

REDUCE = "torch 2.13, torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py, foreach_reduce"
ACCUMULATE = "torch 2.13, torch/distributed/fsdp/_fully_shard/_fsdp_param.py, FSDPParam.to_accumulated_grad_if_needed"

#: Prefix of the final norm's parameters.
FINAL_NORM = "model.norm"


class Plan(NamedTuple):
    """The inputs of an FSDP2 step's moments."""

    recipe: RecipeSpec
    width: Widths
    impl: OptimizerImpl
    reduce_bytes: int
    """Bytes of an element in the reduce-scatter."""
    n: Int
    tp: int
    """Ranks that split matrices."""
    ep: int
    """Ranks that split the experts."""
    gathers: Int
    """1 with more than one rank to gather from, else 0."""
    replicated: Int
    """1 with replicas (HSDP), else 0."""
    several: Int
    """1 if earlier micro-batches of the same step have run, or left gradients, else 0."""
    outlive: int
    """Sets of gradient shards that live through all steps (:func:`outlive_steps`)."""
    twice: Int
    """1 if one has run before another that is not the step's last, else 0."""
    reshard: bool | int
    tree: Layout
    """The parameters of a rank before they are sharded."""
    runs: tuple[BlockRun, ...]
    every_layer: tuple[int, ...]
    """Layers of each run."""
    kinds: tuple[str, ...]
    """Kind of each run, as symbols have it."""
    corners: tuple[Position, ...]
    walk: tuple[Position, ...]
    """The corners and their neighbours."""
    parameters: tuple[Parameter, ...]
    local_tensors: tuple[LocalTensor, ...]
    """This rank's chunks that an optimizer updates."""
    updated: str | None
    """The symbol of their elements, if they are not all that is trained."""
    frozen_tensors: tuple[LocalTensor, ...]
    frozen_width: int
    """Bytes of a frozen element; beside adapters it has the compute dtype unless :attr:`AdapterSpec.base` is fp32."""
    adapter_bytes: int
    """Bytes of an adapter's element while it computes, and of its gradient."""
    root: Group
    blocks: tuple[Group, ...]
    trained_root: Group
    trained_blocks: tuple[Group, ...]
    """The trained parts of the groups: all of them, unless weights are frozen."""
    ends: Ends | None
    """Separate units outside the blocks; the root group is then empty."""
    cast_too: bool
    """Frozen parameters are as wide as trained ones and are cast before a gather (:attr:`ModelSpec.frozen_as_trained`)."""
    trained_kinds: tuple[str, ...]
    """Kind of the trained part of each run, as symbols write it."""
    tail_elements: int
    """Elements of the root group's gradients after the final norm's backward."""
    tied_head_elements: int
    """Elements of a tied head, whose gradient then has two parts."""
    embedding_elements: int
    """Elements of the largest table: the token embedding."""
    projector_elements: int
    """Trained elements before the blocks beside the embedding, in a model with a vision tower."""
    last_root_elements: int
    passes: tuple[BlockPass, ...]
    head: HeadPass
    at_embedding: AtEmbedding | None
    """Tensors that a vocabulary-parallel embedding's backward allocates."""
    tower_layers: int
    """Number of a vision tower's blocks, which run first."""
    first_ahead: int | None
    """The first block of multi-token prediction, counted from 0."""
    is_a_stage: bool
    """It is a plan of a pipeline's stage, not of a whole model."""
    shared_sequences: bool
    """Context-parallel ranks share every sequence."""
    recomputes: tuple[Recompute, ...]
    """The recomputation of each run's blocks."""
    kept: tuple[Int, ...]
    """Bytes that one block of each run keeps from its forward to its backward."""
    persistent: tuple[Line, ...]
    """Parameters and optimizer state of this rank; lines of 0 bytes if they are in host memory."""
    in_host_memory: tuple[Line, ...]
    """The same lines in host memory."""

    @property
    def gathered_blocks(self) -> tuple[tuple[Group, ...], tuple[str, ...]]:
        """The groups that the all-gathers of each run's blocks collect, and their symbols."""
        return self.blocks, self.kinds

    @property
    def kept_in_a_block(self) -> tuple[tuple[str, tuple[Line, ...]], ...]:
        """The lines that one block of each run keeps from its forward to its backward."""
        runs = zip(self.runs, self.passes, self.recomputes, strict=True)
        return tuple((run.name, one.kept(again)) for run, one, again in runs)

    @property
    def offloaded(self) -> bool:
        """Whether shards and optimizer are in host memory."""
        return self.recipe.fsdp2.cpu_offload

    @property
    def beyond_pinned_bytes(self) -> Int:
        """Size of pinned blocks beyond the parameter shards, each pinned separately; gradients are not pinned. [bytes]"""
        tensors = ((self.local_tensors, self.width.stored), (self.frozen_tensors, self.frozen_width))
        each = [(one, width) for some, width in tensors for one in some] if self.offloaded else []
        return added_up(one.repeat * rounding(width * one.numel) for one, width in each)

    @property
    def of_torch_2_15(self) -> bool:
        """Whether ``fully_shard`` is that of torch 2.15."""
        return self.recipe.fsdp2.of_torch_2_15

    @property
    def has_experts_apart(self) -> bool:
        """Whether a rank has only some of the experts."""
        return any(group.experts is not None for group in self.blocks)

    @property
    def recomputed(self) -> bool:
        """Whether the backward recomputes blocks, in part or whole."""
        return self.recipe.recompute != "none"

    @property
    def waiting_elements(self) -> int:
        """Elements of a tied head's gradient that waits for the embedding's; 0 for a chunked loss, which runs its own backward."""
        return 0 if self.recipe.loss == "chunked" else self.tied_head_elements

    @property
    def loss_in_loop(self) -> bool:
        """Whether the training loop computes the loss after the model's forward, as torchtitan's and torchtune's do."""
        return self.recipe.fsdp2.are_torchtitans or "loss-in-pieces" in self.recipe.fused_parts

    @property
    def chunks_apart(self) -> bool:
        """Whether a chunked loss gathers the head's unit by itself, and reduces its gradient, as torchtitan's does."""
        return self.recipe.fsdp2.modules == "torchtitan-0.3"

    @property
    def sums_tied(self) -> bool:
        """Whether a tied head's gradient and the embedding's are summed out of place. Liger's loss allows an in-place sum."""
        return bool(self.waiting_elements) and self.recipe.loss == "full"

    @property
    def adds_up(self) -> bool:
        """Whether autograd accumulates a gradient into that of earlier micro-batches.

        It does under ``no_sync``, unless FSDP2 moves those to the reduction's wider dtype, as in torch 2.13.
        """
        return not self.recipe.sync_every_micro_batch and (self.reduce_bytes == self.width.compute or self.of_torch_2_15)

    @property
    def adds_shards(self) -> bool:
        """Whether a reduction's result is added to the shard of earlier micro-batches, where that one is."""
        return self.recipe.sync_every_micro_batch

    @property
    def cast_on_arrival(self) -> bool:
        """Whether autograd casts whole gradients to the reduction's wider dtype on arrival, as in torch 2.15."""
        return self.of_torch_2_15 and self.reduce_bytes != self.width.compute

    @property
    def outside(self) -> tuple[Group, ...]:
        """The units outside the blocks."""
        return (self.root,) if self.ends is None else (self.ends.embedding, self.ends.head)

    @property
    def trained_outside(self) -> tuple[Group, ...]:
        """The trained parts of the units outside the blocks."""
        return (self.trained_root,) if self.ends is None else (self.ends.trained_embedding, self.ends.trained_head)

    @property
    def padded(self) -> Int:
        """All parameters with their padding. [elements]"""
        return self.n * shards_of(self.outside, self.blocks, self.every_layer)

    @property
    def numel(self) -> int:
        """All parameters without padding. [elements]"""
        in_blocks = sum(run.layers * group.numel for run, group in zip(self.runs, self.blocks, strict=True))
        return in_blocks + sum(group.numel for group in self.outside)

    @property
    def is_partly_frozen(self) -> bool:
        """Whether some parameters get no gradients."""
        return self.trained_blocks is not self.blocks

    @property
    def trained_symbol(self) -> str:
        """The symbol of the padded trained parameters in formulas."""
        return "P" if self.trained_blocks is self.blocks else "P_trained"

    def trained_shards(self, layers: tuple[int, ...], outside: tuple[Group, ...] = ()) -> Int:
        """Return this rank's chunks of the trained parameters in these layers of each run, and in units outside them. [elements]"""
        return shards_of(outside, self.trained_blocks, layers)

    def gradient_shards(self, layers: tuple[int, ...], when: str, outside: tuple[Group, ...] = ()) -> Line:
        """Return this rank's gradient shards of these layers; of all layers, if earlier micro-batches have left theirs."""
        line = self.reduced_gradients(layers, when, outside)
        return on_host(line) if self.offloaded else line

    def reduced_gradients(self, layers: tuple[int, ...], when: str, outside: tuple[Group, ...] = ()) -> Line:
        """Return the same, on the GPU or in host memory."""
        if self.recipe.fsdp2.step_in_backward:
            return Line(Kind.GRADIENTS, 0, "gradients, which each step frees", "0", REDUCE)
        stored, earlier_too = self.width.stored, self.adds_shards
        now = self.trained_shards(layers, outside)
        if earlier_too and not (isinstance(self.several, int) and not self.several):
            sets = self.several * max(1, self.outlive)
            now = maximum(now, sets * self.trained_shards(self.every_layer, self.trained_outside))
        earlier = f"{stored * max(1, self.outlive)}·M·{self.trained_symbol}/N" if earlier_too else ""
        reason, formula = _reduced_in_words(stored, layers, self.trained_kinds, when, sum_of("P", outside), earlier)
        return Line(Kind.GRADIENTS, stored * now, reason, formula, REDUCE)

    def stepping(self, *, in_block: bool) -> tuple[Line, ...]:
        """Return the temporaries of the largest parameter's step inside the backward; none if steps are after it. [bytes]"""
        if not self.recipe.fsdp2.step_in_backward:
            return ()
        largest = maximum(0, *(one.numel for one in self.local_tensors if one.in_block is in_block))
        lines = step_temporary_lines(self.recipe.optimizer, self.impl, (LocalTensor((largest,)),), self.width.stored)
        return tuple(
            [line._replace(formula=product(1, line.n_bytes) if isinstance(line.n_bytes, int) else "") for line in lines]
        )

    def shards_viewed(self, layers: tuple[int, ...]) -> tuple[Line, ...]:  # noqa: ARG002  that of flat parameters needs it
        """Return shards that unsharded blocks keep on the GPU beside offload: none."""
        return ()

    def left_behind(self, layers: tuple[int, ...], outside: tuple[Group, ...] = ()) -> tuple[Line, ...]:
        """Return whole gradients of earlier micro-batches (``no_sync``) in units that are not reduced yet. [bytes]"""
        if self.recipe.sync_every_micro_batch:
            return ()
        elements = sum([group.numel for group in outside]) + weighted(layers, [group.numel for group in self.trained_blocks])
        formula = left_formula(self.reduce_bytes, layers, self.trained_kinds, outside=sum_of("G", outside))
        reason = "whole gradients accumulated by earlier micro-batches"
        return (Line(Kind.UNSHARDED_GRADIENTS, self.several * self.reduce_bytes * elements, reason, formula, ACCUMULATE),)

    def fresh(self, made: int, current: int = 0, *, waiting: int = 0) -> tuple[Int, str]:
        """Return :func:`fresh` gradients of this plan."""
        return fresh(self.width.compute, self.several if self.adds_up else 0, made, current, waiting=waiting)


def fresh(width: int, several: Int, made: int, current: int = 0, *, waiting: int = 0) -> tuple[Int, str]:
    """Return this micro-batch's gradients that are separate from earlier ones, and their formula. [bytes]

    ``several``: 1 if autograd accumulates them into gradients of earlier micro-batches, else 0. ``made``: elements so far;
    ``current``: of them being made, before they are accumulated; ``waiting``: elements that have not reached their parameter yet.
    """
    if isinstance(several, int) and not several:
        return width * (made + waiting), product(width, made + waiting)
    beside = (1 - several) * made + several * current + waiting
    return width * beside, f"{width}·((1-M)·{made} + M·{current} + {waiting})"


def sum_of(letter: str, outside: tuple[Group, ...]) -> str:
    """Return the symbols of the parameters of units outside the blocks; empty without such units or if all are frozen."""
    return " + ".join([f"{letter}_{group.symbol}" for group in outside if group.numel])


def make_plan(model: ModelSpec, recipe: RecipeSpec, mesh: Mesh, batch: Batch, *, part: Layout | None = None) -> Plan:
    """Return the plan of a job; ``batch`` is one rank's.

    ``part``: the parameters of a pipeline stage, if ``model`` has only the stage's layers.
    """
    tp, ep, n = int(mesh.tp), int(mesh.ep), mesh.dp_shard * int(mesh.cp)  # an int in a grid, too
    first = first_recomputed(model, recipe)
    cut = cut_of(
        model, widths(recipe.precision), n, part=part, first=first, tp=tp, ep=ep, ends_apart=recipe.fsdp2.shards_ends
    )  # fmt: skip
    if recipe.precision == "bf16" and SENDING & set(recipe.fused_parts):
        from zeroplan.engines.fsdp2.experts import used_as_they_are  # noqa: PLC0415  keeps start-up fast

        blocks = tuple(map(used_as_they_are, cut.blocks))
        cut = cut._replace(blocks=blocks, trained_blocks=blocks if cut.trained_blocks is cut.blocks else cut.trained_blocks)
    if recipe.fsdp2.float8_all_gather:
        from zeroplan.engines.fsdp2.float8 import gathered_in_float8  # noqa: PLC0415  the same

        blocks = tuple(gathered_in_float8(one, run.parameters, n) for one, run in zip(cut.blocks, cut.tree.runs, strict=True))
        cut = cut._replace(blocks=blocks, trained_blocks=blocks)
    frozen = local_tensors(only_frozen(cut.tree), n, tp, ep) if cut.is_partly_frozen else ()
    updated = "P_stepped/N" if model.adapter is not None and model.adapter.runs else None
    tensors = local_tensors(only_stepped(cut.learning, model.adapter), n, tp, ep)
    if recipe.optimizer == "muon":
        tensors = tuple([one._replace(replicas=mesh.dp_replicate) for one in tensors])
    return plan_of(cut, tensors, frozen, model, recipe, mesh, batch, part=part, updated=updated)


def plan_of(
    cut: Cut, tensors: tuple[LocalTensor, ...], frozen_tensors: tuple[LocalTensor, ...], model: ModelSpec, recipe: RecipeSpec,
    mesh: Mesh, batch: Batch, *, part: Layout | None = None, autocast: bool = False, updated: str | None = None,
) -> Plan:  # fmt: skip
    """Return the plan of given groups, of which this rank trains some tensors.

    ``autocast``: the loop also runs the model under ``torch.autocast``. ``updated``: the symbol of the elements that this rank
    updates, if they are not its share of all padded parameters.
    """
    tp, cp, width = int(mesh.tp), int(mesh.cp), widths(recipe.precision)
    compute = compute_of(recipe, tp=tp, ep=int(mesh.ep), cp=cp)
    compute = compute._replace(autocast=True) if autocast else compute
    passes, head, tables = _program(model, recipe, batch, cut.tree, compute)
    narrow = recipe.fsdp2.float8_layers is not None  # layers without float8 are recomputed like the others
    recomputes = tuple(compute.recompute if narrow else recompute_of(run, compute) for run in cut.tree.runs)
    frozen_width = width.stored if model.frozen_as_trained else width.compute
    buffers = (*held_buffers(model, cut.tree, width.compute), *tables, *tables_in_layers(model, recipe, frozen_width))
    here, there = _held(_states(cut, tensors, recipe, frozen_width, updated), buffers, recipe, cut)
    if {"te-float8", "te-experts"} <= set(recipe.fused_parts):
        from zeroplan.transformer.families.te_float8 import cached  # noqa: PLC0415  keeps start-up fast

        here = (*here, cached(cut.tree))
    in_the_loop = held_beside(model, recipe, batch) if cp == 1 or part is not None else (_whole_sequences(batch, cp),)
    return Plan(
        recipe=recipe,
        width=width,
        impl=implementation_of(recipe),
        reduce_bytes=width.compute if recipe.fsdp2.reduce_dtype == "param" else width.stored,
        local_tensors=tensors,
        updated=updated,
        outlive=outlive_steps(model),
        frozen_tensors=frozen_tensors,
        frozen_width=frozen_width,
        adapter_bytes=width.stored if model.adapter is not None and model.adapter.compute == "fp32" else width.compute,
        passes=passes,
        head=head,
        at_embedding=None if tp == 1 else _at_embedding(model, compute, batch),
        recomputes=recomputes,
        kept=tuple(total_bytes(one.kept(again)) for one, again in zip(passes, recomputes, strict=True)),
        persistent=(*here, *in_the_loop),
        is_a_stage=part is not None,
        in_host_memory=there,
        **_of_the_ranks(recipe, mesh, batch, keeps_gradients=outlive_steps(model) > 0),
        **_of_the_model(cut, model, recipe),
    )


def outlive_steps(model: ModelSpec) -> int:
    """Return how many sets of all adapters' gradient shards live through all steps; 0 if each step frees its gradients.

    prime-rl's optimizers free the gradients of the adapters that they step. Gradients of a unit are views of one buffer, which
    lives as long as one of them: one buffer for adapters that no optimizer steps, and at most one more for each that steps.

    Source: prime-rl b798a90d, trainer/optim.py, MultiLoRAOptimizer.zero_grad; torch 2.13, ``foreach_reduce``.
    """
    adapter = model.adapter
    return 0 if adapter is None or adapter.runs < 2 else min(adapter.runs, adapter.stepped + 1)


def _held(
    states: tuple[Line, ...], tables: tuple[Line, ...], recipe: RecipeSpec, cut: Cut
) -> tuple[tuple[Line, ...], tuple[Line, ...]]:
    """Return states and tables on the GPU and those in host memory. FSDP1 moves shards alone, not buffers or tables.

    Scales of weights in few bits are no parameters, and stay where the weights were quantised.

    Source: torch 2.13, torch/distributed/fsdp/_init_utils.py; buffers follow in _runtime_utils.py, ``_lazy_init``.
    """
    every = (*states, *tables)
    if not recipe.fsdp2.cpu_offload:
        return every, ()
    stay = (*cut.beside, *(tables if recipe.engine == "fsdp1" else ()))
    moves = [all(line is not one for one in stay) for line in every]
    return tuple(on_host(line) if moved else line for line, moved in zip(every, moves, strict=True)), tuple(
        line for line, moved in zip(every, moves, strict=True) if moved
    )


def _states(
    cut: Cut, tensors: tuple[LocalTensor, ...], recipe: RecipeSpec, frozen_width: int, updated: str | None
) -> tuple[Line, ...]:  # fmt: skip
    """Return this rank's parameters, quantised weights' scales and tables, and its optimizer state."""
    width = widths(recipe.precision)
    parameters, symbol = parameter_lines(cut, width, frozen=frozen_width)
    optimizer = state_lines(recipe.optimizer, implementation_of(recipe), tensors, width.stored, symbol=updated or symbol)
    return (*parameters, *cut.beside, *optimizer)


def _of_the_ranks(recipe: RecipeSpec, mesh: Mesh, batch: Batch, *, keeps_gradients: bool) -> dict[str, Any]:
    """Return a plan's fields that follow from the degrees and the number of micro-batches.

    ``keeps_gradients``: gradients of earlier steps are there as well.
    """
    n = mesh.dp_shard * int(mesh.cp)
    return {
        "n": n,
        "tp": int(mesh.tp),
        "ep": int(mesh.ep),
        "gathers": where(n > 1, 1, 0),
        "replicated": where(mesh.dp_replicate > 1, 1, 0),
        "several": where((batch.grad_accum_steps > 1) | keeps_gradients, 1, 0),
        "twice": where(batch.grad_accum_steps > 2, 1, 0),
        "reshard": _reshard(recipe, n),
        "shared_sequences": int(mesh.cp) > 1,
    }


def _of_the_model(cut: Cut, model: ModelSpec, recipe: RecipeSpec) -> dict[str, Any]:
    """Return a plan's fields that follow from the tensors and how they are grouped."""
    tree, learning, first = cut.tree, cut.learning, first_recomputed(model, recipe)
    return {
        "tree": tree,
        "runs": tree.runs,
        "every_layer": tuple(run.layers for run in tree.runs),
        "kinds": tuple(run.name for run in tree.runs),
        "corners": corners(model, first),
        "walk": walk(model, first, max(recipe.fsdp2.forward_prefetch, recipe.fsdp2.backward_prefetch - 1)),
        "parameters": _every_parameter(tree),
        "root": cut.root,
        "blocks": cut.blocks,
        "trained_root": cut.trained_root,
        "trained_blocks": cut.trained_blocks,
        "ends": cut.ends,
        "cast_too": model.frozen_as_trained,
        "trained_kinds": tuple(group.symbol for group in cut.trained_blocks),
        "tail_elements": sum(parameter.numel for parameter in learning.tail),
        "tied_head_elements": 0 if learning.tied_head is None else learning.tied_head.numel,
        "embedding_elements": max([one.numel for one in learning.embeddings if len(one.shape) > 1], default=0),
        "projector_elements": sum([one.numel for one in learning.embeddings if one.name.startswith(BESIDE_THE_TEXT)]),
        "last_root_elements": next((one.numel for one in (*learning.tail[::-1], *learning.embeddings[::-1])), 0),
        "tower_layers": model.tower_layers,
        "first_ahead": model.num_hidden_layers - len(PREDICTS) * model.predictions if model.predictions else None,
    }


def _program(
    model: ModelSpec, recipe: RecipeSpec, batch: Batch, tree: Layout, compute: Compute
) -> tuple[tuple[BlockPass, ...], HeadPass, tuple[Line, ...]]:
    """Return the passes of each run's block and of the part outside, and tables that the program always holds."""
    if recipe.fsdp2.are_torchtitans:
        from zeroplan.engines.fsdp2.torchtitan import passes_of  # noqa: PLC0415  only its jobs pay for it

        blocks, head, rotations = passes_of(model, recipe, batch)
        return blocks, head, (rotations,)
    passes = tuple(run_pass(model, run, compute, batch) for run in tree.runs)
    return passes, outside(model, recipe, batch, tp=compute.tp, cp=compute.cp), ()


def _whole_sequences(batch: Batch, ranks: int) -> Line:
    from zeroplan.transformer.context import whole_sequences  # noqa: PLC0415  keeps start-up fast

    return whole_sequences(batch, ranks)


def _at_embedding(model: ModelSpec, compute: Compute, batch: Batch) -> AtEmbedding:
    from zeroplan.transformer.split_embedding import at_the_embedding  # noqa: PLC0415  keeps start-up fast

    return at_the_embedding(model, compute, batch)


def _reshard(recipe: RecipeSpec, n: Int) -> bool | int:
    """Return ``fully_shard``'s argument. A number equal to the ranks is ``True``."""
    chosen = recipe.fsdp2.reshard_after_forward
    if chosen is None:
        return recipe.zero_stage == 3
    return True if not isinstance(chosen, bool) and isinstance(n, int) and chosen == n else chosen


@lru_cache(maxsize=256)
def _every_parameter(tree: Layout) -> tuple[Parameter, ...]:
    blocks = tuple(parameter for run in tree.runs for parameter in run.parameters)
    return (*tree.embeddings, *blocks, *tree.tail)


@lru_cache(maxsize=4096)
def shards_formula(width: int, layers: tuple[int, ...], symbols: tuple[str, ...], *, outside: str) -> str:
    """Return the formula of the chunks of these layers of each run.

    >>> shards_formula(4, (31,), ("dense",), outside="P_root")
    '4·(31·P_dense + P_root)/N'
    """
    return f"{width}·({blocks_sum('P', layers, symbols, outside)})/N"


@lru_cache(maxsize=4096)
def _reduced_in_words(
    width: int, layers: tuple[int, ...], kinds: tuple[str, ...], when: str, outside: str, earlier: str
) -> tuple[str, str]:  # fmt: skip
    formula = shards_formula(width, layers, kinds, outside=outside)
    return f"this rank's chunk of the gradients, {when}", f"max({formula}, {earlier})" if earlier else formula


@lru_cache(maxsize=4096)
def left_formula(width: int, layers: tuple[int, ...], symbols: tuple[str, ...], *, outside: str) -> str:
    """Return the formula of earlier micro-batches' whole gradients.

    >>> left_formula(4, (31,), ("dense",), outside="G_root")
    '4·M·(31·G_dense + G_root)'
    """
    return f"{width}·M·({blocks_sum('G', layers, symbols, outside)})"
