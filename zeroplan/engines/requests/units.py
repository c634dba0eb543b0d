"""A model of FSDP's units, request by request: both versions of FSDP have hooks at the same places of forward and backward."""

from zeroplan.engines.fsdp2.plan import Plan
from zeroplan.engines.fsdp2.runtime import Parts, Runtime, Unit, Units
from zeroplan.engines.optimizers import LocalTensor
from zeroplan.engines.precisions import compute_of
from zeroplan.engines.requests.log import Log
from zeroplan.engines.requests.model import ENDING, ModelPass
from zeroplan.engines.requests.optimizer import Update
from zeroplan.spec.batch import Batch
from zeroplan.spec.mesh import Mesh
from zeroplan.spec.model import ModelSpec
from zeroplan.transformer.parameters import Parameter


class UnitPass(Runtime, ModelPass):
    """A rank's micro-batches and steps. The name of a block's unit is its layer."""

    def __init__(self, model: ModelSpec, mesh: Mesh, plan: Plan, batch: Batch, log: Log) -> None:
        compute = compute_of(plan.recipe, tp=int(mesh.tp), ep=int(mesh.ep), cp=int(mesh.cp))
        ModelPass.__init__(self, model, plan.recipe, batch, log, compute=compute, tree=plan.tree, head=plan.head)
        Runtime.__init__(self, plan, log, {})
        units, tree, self.replicas = Units(plan), self.tree, int(mesh.dp_replicate)
        self.outside = (units.root,) if units.ends is None else (units.ends.embedding, units.ends.head)
        self.units = tuple(Unit(layer, units.blocks[run]) for layer, run in enumerate(self.order))
        parts = (*(unit.parts for unit in self.outside), *units.blocks)
        outside = ((*tree.embeddings, *tree.tail),) if units.ends is None else (tree.embeddings, tree.tail)
        parameters = (*outside, *(run.parameters for run in tree.runs))
        self.parameters_of: dict[Parts, tuple[Parameter, ...]] = dict(zip(parts, parameters, strict=True))
        self.optimizer, self.tensors = Update(plan.recipe.optimizer, plan.impl, plan.width.stored), list[LocalTensor]()

    @property
    def ends_apart(self) -> bool:
        """Whether embedding and head have units of their own."""
        return len(self.outside) > 1

    @property
    def every_unit(self) -> tuple[Unit, ...]:
        """All units, blocks first, as FSDP wraps them."""
        return (*self.units, *self.outside)

    @property
    def unit_here(self) -> Unit:
        """The unit of the layer that runs."""
        if self.log.layer >= 0:
            return self.units[self.log.layer]
        return self.outside[-1] if self.log.layer == ENDING else self.outside[0]

    def before_forward(self) -> None:
        """Unshard the root unit, or the embedding's."""
        self.pre_forward(self.outside[0])

    def after_embedding(self) -> None:
        """Reshard the embedding's own unit."""
        if self.ends_apart:
            self.post_forward(self.outside[0])

    def before_block(self, layer: int) -> None:
        """Unshard the block."""
        self.pre_forward(self.units[layer])

    def after_block(self, layer: int) -> None:
        """Reshard the block, unless it stays unsharded."""
        self.post_forward(self.units[layer])

    def before_ending(self) -> None:
        """Unshard the unit of norm and head."""
        if self.ends_apart:
            self.pre_forward(self.outside[-1])

    def after_ending_backward(self) -> None:
        """Reduce the unit of norm and head."""
        if self.ends_apart:
            self.post_backward(self.outside[-1])

    def before_block_backward(self, layer: int) -> None:
        """Unshard the block, and prefetch the block below, or the embedding's unit."""
        below = self.units[layer - 1] if layer else self.outside[0] if self.ends_apart else None
        self.pre_backward(self.units[layer], below)

    def after_block_backward(self, layer: int) -> None:
        """Reduce the block."""
        self.post_backward(self.units[layer])

    def before_embedding_backward(self) -> None:
        """Unshard the embedding's own unit."""
        if self.ends_apart:
            self.pre_backward(self.outside[0], None)

    def after_backward(self) -> None:
        """Reduce the root unit, or the embedding's."""
        self.post_backward(self.outside[0])
