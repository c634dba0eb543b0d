"""One stage of a pipeline as FSDP2 holds it: its layers' plan, and what a micro-batch leaves in it between its passes.

A stage is a model of fewer layers, without the embedding or without the final norm and the head. What it is given by another
rank stands in a receive buffer, which is there all the time, so that the first block's input and the gradient that comes in at
the last block cost nothing more.
"""

from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from zeroplan.engines.fsdp2.groups import layout_of_a_rank
from zeroplan.engines.fsdp2.plan import Plan, make_plan
from zeroplan.engines.positions import Position
from zeroplan.engines.precisions import compute_of
from zeroplan.ledger import Kind, Line, Role, Tag, total_bytes
from zeroplan.numeric import Int
from zeroplan.spec.batch import Batch
from zeroplan.spec.frozen import FrozenSpec
from zeroplan.spec.mesh import Mesh
from zeroplan.spec.model import ModelSpec
from zeroplan.spec.pipeline import SPLIT, Stage
from zeroplan.spec.recipe import RecipeSpec
from zeroplan.transformer.blocks import At, BackwardPoint
from zeroplan.transformer.families.halves import Halves, block_halves, head_halves
from zeroplan.transformer.families.tags import SAVED
from zeroplan.transformer.parameters import BlockRun, Layout
from zeroplan.transformer.params import layout

CHECKPOINT = "torch 2.13, torch/utils/checkpoint.py, _checkpoint_without_reentrant_generator"
FORWARD = "torchtitan, experiments/transformers_modeling_backend/model.py, HFTransformerModel.forward"


class Split(NamedTuple):
    """A stage's backward in two halves: of a block of each run, and of final norm and head."""

    blocks: tuple[Halves, ...]
    head: Halves | None

    def held(self, layers: tuple[int, ...]) -> Int:
        """What this many blocks of each run hold from the first half to the second. [bytes]"""
        n_bytes: Int = 0
        for count, one in zip(layers, self.blocks, strict=True):
            n_bytes = n_bytes + count * one.held
        return n_bytes


class StagePlan(NamedTuple):
    """A stage: the plan of its layers, and the sizes that only a stage has. [bytes]"""

    stage: Stage
    plan: Plan
    positions: tuple[Position, ...]
    """Layers at which a maximum can lie, counted within the stage and named within the model."""
    walk: tuple[Position, ...]
    """The same layers and their neighbours."""
    hidden_bytes: Int
    """What it sends for each micro-batch, and what it is sent."""
    output_bytes: Int
    """What it returns for each micro-batch: hidden states, or logits."""
    input_is_kept: bool
    """The first block's input is among what blocks keep for their backward."""
    split: bool
    """Ranks split its blocks or share its sequences."""
    by_rank: Line | None
    """Under tensor parallelism: what is gathered along the sequence, before it is put in order."""
    halves: "Split | None" = None
    """Where a schedule takes backwards in two halves."""

    @property
    def kept_bytes(self) -> Int:
        """What one micro-batch leaves in the stage from its forward to its backward, its output and its input apart."""
        plan = self.plan
        n_bytes: Int = total_bytes(plan.head.shared) - (self.hidden_bytes if self.takes_from_buffer else 0)
        for layers, each in zip(plan.every_layer, plan.kept, strict=True):
            n_bytes = n_bytes + layers * each
        if not self.stage.is_last:
            return n_bytes
        if self.is_chunked:  # the head's input is the stage's output, and the loss keeps the gradient of it
            return n_bytes + total_bytes(plan.head.saved)
        return n_bytes + total_bytes((*plan.head.saved, *plan.head.loss))

    @property
    def is_chunked(self) -> bool:
        """Whether the stage ends in hidden states, of which the loss takes a chunk after the other through the head and back."""
        return self.stage.is_last and self.plan.recipe.loss == "chunked"

    @property
    def head_elements(self) -> int:
        """Elements of the head's gradient, which a chunked loss makes before the stage's backward."""
        return max(point.gradients - point.current_gradient for point in self.ending[0])

    @property
    def ending(self) -> tuple[tuple[BackwardPoint, ...], tuple[BackwardPoint, ...]]:
        """What of loss, head and final norm runs its backward in the stage's forward, and what in its backward."""
        points = self.plan.head.points
        if not self.is_chunked:
            return (), points
        early = tuple(point for point in points if point.place.at is not At.FINAL_NORM)
        return early, points[len(early) :]

    @property
    def between_bytes(self) -> Int:
        """What one micro-batch leaves in the stage from the first half of its backward to the second, where it is in two.

        All that was kept but the loss's, and gradients; the one of its input is passed on and counts where it is sent.
        """
        if self.halves is None or self.stage.number == 0:
            return 0
        n_bytes = self.kept_bytes + self.halves.held(self.plan.every_layer) - self.hidden_bytes
        return n_bytes + (self.halves.head.held - total_bytes(self.plan.head.loss) if self.halves.head is not None else 0)

    @property
    def takes_from_buffer(self) -> bool:
        """Whether what blocks are said to keep has a receive buffer among it."""
        return self.input_is_kept and not self.stage.is_first

    def given(self, lines: tuple[Line, ...]) -> tuple[Line, ...]:
        """What a stage's first block is given for its forward, which stands in a receive buffer."""
        return lines if self.stage.is_first else _without(lines, self.hidden_bytes, Role.BLOCK_INPUT)

    def at_its_beginning(self, lines: tuple[Line, ...]) -> tuple[Line, ...]:
        """Lines of a stage's first block until its backward: what comes back from host memory is a copy of the receive buffer."""
        return lines if self.plan.recipe.offload_activations else self.given(lines)

    def at_its_end(self, lines: tuple[Line, ...]) -> tuple[Line, ...]:
        """Lines of a stage's last block until the incoming gradient has been added to, which stands in a receive buffer."""
        return lines if self.stage.is_last else _without(lines, self.hidden_bytes, Role.INCOMING)


def _without(lines: tuple[Line, ...], n_bytes: Int, role: Role) -> tuple[Line, ...]:
    """Leave out the line that is the tensor in the buffer: the one of this role, as large as that."""
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
    """Size the layers of every stage, and what is outside them in it; stages that are alike are sized once."""
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
    """A stage's own recipe: how many of its layers are recomputed, where the model's first this many are."""
    if recipe.recompute_layers is None:
        return recipe
    layers = min(stage.layers, max(0, recipe.recompute_layers - stage.start))
    if not layers:
        return replace(recipe, recompute="none", recompute_layers=None)
    return replace(recipe, recompute_layers=None if layers == stage.layers else layers)


def stage_plan_of(
    fewer: ModelSpec, part: Layout, recipe: RecipeSpec, mesh: Mesh, batch: Batch, stage: Stage
) -> StagePlan:  # fmt: skip
    """Size a stage's layers, whose names are those of a model that has no others."""
    plan = make_plan(fewer, recipe, mesh, batch, part=part)
    head, at_embedding = plan.head, plan.at_embedding
    of_all = mesh.cp != 1  # positions, which are made once
    positions = Line(SAVED, 8 * batch.seq_len, "position ids, int64, held by checkpoints", "8·s", CHECKPOINT)
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
        blocks = tuple([block_halves(fewer, run, compute, batch) for run in part.runs])
        halves = Split(blocks, head_halves(fewer, part.tail, compute, batch) if stage.is_last else None)
    split = mesh.tp != 1 or mesh.cp != 1
    return StagePlan(stage, plan, plan.corners, plan.walk, head.hidden_bytes, logits, kept, split, by_rank, halves)


@lru_cache(maxsize=4096)
def layers_of(model: ModelSpec, stage: Stage, *, tp: int = 1, ep: int = 1) -> tuple[ModelSpec, Layout]:
    """The stage's layers as a model of its own, and the parameters that one of ``tp`` or ``ep`` ranks really has of them."""
    moe = model.moe
    if moe is not None and moe.num_dense_layers:
        moe = replace(moe, num_dense_layers=max(0, min(stage.layers, moe.num_dense_layers - stage.start)))
    fewer = replace(model, num_hidden_layers=stage.layers, moe=moe, frozen=_frozen_of(model, stage))
    tree = layout_of_a_rank(fewer, tp=tp, ep=ep)
    if model.adapter is not None and not stage.is_first:
        tree = tree._replace(runs=_followed(fewer, tree))
    embeddings, tail = tree.embeddings if stage.is_first else (), tree.tail if stage.is_last else ()
    return fewer, tree._replace(embeddings=embeddings, tail=tail)


def _frozen_of(model: ModelSpec, stage: Stage) -> FrozenSpec | None:
    """What is frozen of a stage; what another rank sends it has a gradient, as a trained embedding's output has."""
    if model.frozen is None:
        return None
    ends = {"embedding": stage.is_first, "norm": stage.is_last, "head": stage.is_last}
    parts = ",".join(name for name in model.frozen.names if ends[name])
    layers = min(stage.layers, max(0, model.frozen.layers - stage.start))
    return FrozenSpec(parts=parts, layers=layers) if parts or layers else None


def _followed(fewer: ModelSpec, tree: Layout) -> tuple[BlockRun, ...]:
    """Runs of a stage with adapters whose input has a gradient: its first block is like the others."""
    kind = layout(replace(fewer, adapter=None)).runs[0].kind
    return tuple(run._replace(kind=kind) if run.kind == "first" else run for run in tree.runs)


@lru_cache(maxsize=4096)
def named(positions: tuple[Position, ...], stage: Stage, layers: int) -> tuple[Position, ...]:
    """Layers of a stage, called as in the whole model."""
    return tuple(one._replace(name=f"block {stage.start + one.layer + 1} of {layers}") for one in positions)
