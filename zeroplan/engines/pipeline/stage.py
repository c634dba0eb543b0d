"""One stage of a pipeline as FSDP2 holds it: its layers' plan, and a micro-batch's tensors between its passes.

A stage is a model of fewer layers, without the embedding or without final norm and head. Its inputs from another rank are in a
receive buffer, which always exists. So the first block's input and the last block's incoming gradient cost nothing more.
"""

from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from zeroplan.engines.formulas import sized
from zeroplan.engines.fsdp2.groups import layout_of_a_rank
from zeroplan.engines.fsdp2.plan import Plan, make_plan
from zeroplan.engines.positions import Position
from zeroplan.engines.precisions import compute_of
from zeroplan.ledger import Kind, Line, Role, Tag, total_bytes
from zeroplan.numeric import Int, weighted
from zeroplan.spec.batch import Batch
from zeroplan.spec.frozen import FrozenSpec
from zeroplan.spec.mesh import Mesh
from zeroplan.spec.model import ModelSpec
from zeroplan.spec.pipeline import SPLIT, Stage
from zeroplan.spec.recipe import RecipeSpec
from zeroplan.transformer.blocks import At, BackwardPoint
from zeroplan.transformer.families.split_backward import SplitBackward, split_block, split_ending
from zeroplan.transformer.families.tags import SAVED
from zeroplan.transformer.parameters import Layout
from zeroplan.transformer.params import layout

CHECKPOINT = "torch 2.13, torch/utils/checkpoint.py, _checkpoint_without_reentrant_generator"
FORWARD = "torchtitan, experiments/transformers_modeling_backend/model.py, HFTransformerModel.forward"


class Split(NamedTuple):
    """The two halves of a stage's backward: for a block of each run, and for final norm and head."""

    blocks: tuple[SplitBackward, ...]
    head: SplitBackward | None

    def held(self, layers: tuple[int, ...]) -> Int:
        """Return the memory that this many blocks of each run hold from the first half to the second. [bytes]"""
        return weighted(layers, [one.held for one in self.blocks])


class StagePlan(NamedTuple):
    """A stage: the plan of its layers, and the sizes that only a stage has. [bytes]"""

    stage: Stage
    plan: Plan
    positions: tuple[Position, ...]
    """Layers at which memory can peak, indexed within the stage and named within the model."""
    walk: tuple[Position, ...]
    """The same layers and their neighbours."""
    hidden_bytes: Int
    """Size of the hidden states that it sends and receives per micro-batch."""
    output_bytes: Int
    """Size of its output per micro-batch: hidden states, or logits."""
    input_is_kept: bool
    """The first block's input is among the tensors that blocks keep for their backward."""
    split: bool
    """Ranks split its blocks or share its sequences."""
    by_rank: Line | None
    """Under tensor parallelism, the sequence gathered rank by rank, before it is reordered."""
    halves: "Split | None" = None
    """The halves, if a schedule splits backwards."""

    @property
    def kept_bytes(self) -> Int:
        """Size of one micro-batch's tensors from forward to backward, without its output and its input."""
        plan = self.plan
        n_bytes = total_bytes(plan.head.shared) - (self.hidden_bytes if self.takes_from_buffer else 0)
        n_bytes = n_bytes + weighted(plan.every_layer, plan.kept)
        if not self.stage.is_last:
            return n_bytes
        if self.is_chunked:  # the head's input is the stage's output, and the loss keeps the gradient of it
            return n_bytes + total_bytes(plan.head.saved)
        return n_bytes + total_bytes((*plan.head.saved, *plan.head.loss))

    @property
    def is_chunked(self) -> bool:
        """Whether the stage ends in hidden states, which the loss sends through head and back chunk by chunk."""
        return self.stage.is_last and self.plan.recipe.loss == "chunked"

    @property
    def head_elements(self) -> int:
        """Elements of the head's gradient, which a chunked loss makes before the stage's backward."""
        return max(point.gradients - point.current_gradient for point in self.ending[0])

    @property
    def ending(self) -> tuple[tuple[BackwardPoint, ...], tuple[BackwardPoint, ...]]:
        """Backward points of loss, head and final norm: those in the stage's forward, and those in its backward."""
        points = self.plan.head.points
        if not self.is_chunked:
            return (), points
        early = tuple(point for point in points if point.place.at is not At.FINAL_NORM)
        return early, points[len(early) :]

    @property
    def between_bytes(self) -> Int:
        """Size of one micro-batch's tensors between the two halves of its backward.

        These are all kept tensors except the loss's, and gradients. The input's gradient is sent on and counts there.
        """
        if self.halves is None or self.stage.number == 0:
            return 0
        n_bytes = self.kept_bytes + self.halves.held(self.plan.every_layer) - self.hidden_bytes
        return n_bytes + (self.halves.head.held - total_bytes(self.plan.head.loss) if self.halves.head is not None else 0)

    @property
    def takes_from_buffer(self) -> bool:
        """Whether the kept activations include a tensor that is in a receive buffer."""
        return self.input_is_kept and not self.stage.is_first

    def given(self, lines: tuple[Line, ...]) -> tuple[Line, ...]:
        """Return the lines of a stage's first block without its input, which is in a receive buffer."""
        return lines if self.stage.is_first else _without(lines, self.hidden_bytes, Role.BLOCK_INPUT)

    def at_its_beginning(self, lines: tuple[Line, ...]) -> tuple[Line, ...]:
        """Return lines of a stage's first block until its backward. An offloaded input returns as a copy of the receive buffer."""
        return lines if self.plan.recipe.offload_activations else self.given(lines)

    def at_its_end(self, lines: tuple[Line, ...]) -> tuple[Line, ...]:
        """Return lines of a stage's last block without the incoming gradient, which is in a receive buffer until it is added to."""
        return lines if self.stage.is_last else _without(lines, self.hidden_bytes, Role.INCOMING)


def _without(lines: tuple[Line, ...], n_bytes: Int, role: Role) -> tuple[Line, ...]:
    """Leave out the line of the tensor in the buffer, found by its role and size."""
    for at, line in enumerate(lines):
        if line.tag.role is role and bool(_same(line.n_bytes, n_bytes)):
            return (*lines[:at], *lines[at + 1 :])
    return lines


def _same(one: Int, other: Int) -> bool:
    same = one == other
    return same if isinstance(same, bool) else bool(same.all())


def stage_plans(
    model: ModelSpec, recipe: RecipeSpec, mesh: Mesh, batch: Batch, stages: tuple[Stage, ...]
) -> tuple[StagePlan, ...]:  # fmt: skip
    """Return the plan of every stage; equal stages are planned once."""
    made: dict[object, StagePlan] = {}
    plans = []
    for stage in stages:
        fewer, part = layers_of(model, stage, tp=int(mesh.tp), ep=int(mesh.ep))
        own = recipe_of(recipe, stage)
        alike = (fewer, own, stage.is_first, stage.is_last)
        if alike not in made:
            made[alike] = stage_plan_of(fewer, part, own, mesh, batch, stage)
        one = made[alike]
        positions, walk = (named(which, stage, model.num_hidden_layers) for which in (one.plan.corners, one.plan.walk))
        plans.append(one._replace(stage=stage, positions=positions, walk=walk))
    return tuple(plans)


def recipe_of(recipe: RecipeSpec, stage: Stage) -> RecipeSpec:
    """Return a stage's own recipe, with the number of its recomputed layers."""
    if recipe.recompute_layers is None:
        return recipe
    layers = min(stage.layers, max(0, recipe.recompute_layers - stage.start))
    if not layers:
        return replace(recipe, recompute="none", recompute_layers=None)
    return replace(recipe, recompute_layers=None if layers == stage.layers else layers)


def stage_plan_of(
    fewer: ModelSpec, part: Layout, recipe: RecipeSpec, mesh: Mesh, batch: Batch, stage: Stage
) -> StagePlan:  # fmt: skip
    """Return the plan of a stage, whose layers are named as in a model without others."""
    plan = make_plan(fewer, recipe, mesh, batch, part=part)
    head, at_embedding = plan.head, plan.at_embedding
    of_all = mesh.cp != 1  # positions, which are made once
    positions = sized(SAVED, 8, batch.seq_len, "position ids, int64, held by checkpoints", CHECKPOINT, "s")
    named = Line(Kind.TEMPORARY, 8 * batch.seq_len, "position ids, int64, held by name", "8·s", FORWARD, Tag(Role.BATCH))
    shared = head.with_blocks if stage.is_first else _without(head.with_blocks, head.hidden_bytes, Role.BLOCK_INPUT)
    plan = plan._replace(
        head=head._replace(
            shared=(*shared, *((positions,) if plan.recomputed and not of_all else ())),
            with_blocks=shared,
            forward=(*head.forward, *(() if plan.recomputed or of_all else (named,))),
            first_input=head.first_input if stage.is_first else (),
        ),
        tail_elements=plan.tail_elements if stage.is_last else 0,
        at_embedding=at_embedding if stage.is_first else None,
    )  # fmt: skip
    logits = total_bytes(head.output) if stage.is_last and recipe.loss != "chunked" else head.hidden_bytes
    lowest = plan.corners[0].run
    kept = not plan.recipe.offload_activations and (
        plan.recomputes[lowest] != "none" or not plan.passes[lowest].checkpoint_in_backward
    )
    by_rank = None if at_embedding is None else at_embedding.by_rank
    halves = None
    if recipe.pipeline_schedule in SPLIT:
        compute = compute_of(recipe, tp=int(mesh.tp), ep=int(mesh.ep), cp=int(mesh.cp))
        blocks = tuple([split_block(fewer, run, compute, batch) for run in part.runs])
        halves = Split(blocks, split_ending(fewer, part.tail, compute, batch) if stage.is_last else None)
    split = mesh.tp != 1 or mesh.cp != 1
    return StagePlan(stage, plan, plan.corners, plan.walk, head.hidden_bytes, logits, kept, split, by_rank, halves)


@lru_cache(maxsize=4096)
def layers_of(model: ModelSpec, stage: Stage, *, tp: int = 1, ep: int = 1) -> tuple[ModelSpec, Layout]:
    """Return the stage's layers as a model, and the parameters of one of ``tp`` or ``ep`` ranks."""
    moe = model.moe
    if moe is not None and moe.num_dense_layers:
        moe = replace(moe, num_dense_layers=max(0, min(stage.layers, moe.num_dense_layers - stage.start)))
    fewer = replace(model, num_hidden_layers=stage.layers, moe=moe, frozen=_frozen_of(model, stage))
    tree = layout_of_a_rank(fewer, tp=tp, ep=ep)
    if model.adapter is not None and not stage.is_first:
        # a stage whose input needs a gradient: its first block is like the others
        kind = layout(replace(fewer, adapter=None)).runs[0].kind
        runs = tuple(run._replace(kind=kind) if run.kind == "first" else run for run in tree.runs)
        tree = tree._replace(runs=runs)
    embeddings, tail = tree.embeddings if stage.is_first else (), tree.tail if stage.is_last else ()
    return fewer, tree._replace(embeddings=embeddings, tail=tail)


def _frozen_of(model: ModelSpec, stage: Stage) -> FrozenSpec | None:
    """Return a stage's frozen parts. Received hidden states need a gradient, as a trained embedding's output does."""
    if model.frozen is None:
        return None
    ends = {"embedding": stage.is_first, "norm": stage.is_last, "head": stage.is_last}
    parts = ",".join(name for name in model.frozen.names if ends[name])
    layers = min(stage.layers, max(0, model.frozen.layers - stage.start))
    return FrozenSpec(parts=parts, layers=layers) if parts or layers else None


@lru_cache(maxsize=4096)
def named(positions: tuple[Position, ...], stage: Stage, layers: int) -> tuple[Position, ...]:
    """Return layers of a stage, named as in the whole model."""
    return tuple(one._replace(name=f"block {stage.start + one.layer + 1} of {layers}") for one in positions)
