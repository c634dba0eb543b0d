"""The memory of one block, and of all outside the blocks, under a recipe. It is the same for every engine."""

from zeroplan.engines.formulas import sized
from zeroplan.engines.precisions import compute_of
from zeroplan.ledger import Kind, Line
from zeroplan.spec.batch import Batch
from zeroplan.spec.model import ModelSpec
from zeroplan.spec.recipe import ROUNDING, RecipeSpec, Recompute
from zeroplan.transformer.activations import block_pass
from zeroplan.transformer.blocks import BlockPass, Compute, HeadPass
from zeroplan.transformer.buffers import held_buffers
from zeroplan.transformer.families.widths import widths
from zeroplan.transformer.head import head_pass
from zeroplan.transformer.parameters import BlockRun
from zeroplan.transformer.params import layout
from zeroplan.transformer.vision import pixels

_STREAMS = "TRL 1.16, models/activation_offloading.py, OffloadActivations; torchtune 0.7, training/_activation_offloading.py"


def outside(model: ModelSpec, recipe: RecipeSpec, batch: Batch, *, tp: int = 1, cp: int = 1) -> HeadPass:
    """Return embedding, final norm, head and loss in one pass. ``tp`` ranks split them; ``cp`` ranks share a sequence."""
    head = head_pass(
        model,
        compute_of(recipe, tp=tp, cp=cp),
        batch,
        recomputed=recipe.recompute != "none",
        loss=recipe.loss,
        fp32_output=recipe.keep_logits == "fp32",
    )
    head = _held_once(head) if recipe.keep_logits else head
    if cp == 1:
        return head
    from zeroplan.transformer.context import with_shared_sequences  # noqa: PLC0415  keeps start-up fast

    return with_shared_sequences(head, batch, cp)


def _held_once(head: HeadPass) -> HeadPass:
    """Return the memory without logits that the loss keeps and the training loop holds, too: engines add the loop's."""

    def without(lines: tuple[Line, ...]) -> tuple[Line, ...]:
        return tuple([line for line in lines if not any(line is one for one in head.output)])

    points = tuple([one._replace(lines=without(one.lines), before=without(one.before)) for one in head.points])
    return head._replace(loss=without(head.loss), points=points)


def _in_flight(model: ModelSpec, recipe: RecipeSpec, batch: Batch) -> tuple[Line, ...]:
    """Return the latest saved tensors that streams still copy to the host, at most: of all widths without recomputation. [bytes]"""
    if not (count := min(recipe.inputs_in_flight, model.num_hidden_layers)):
        return ()
    all_widths = recipe.recompute == "none"
    width, named = (max(model.hidden_size, model.intermediate_size), "max(h, f)") if all_widths else (model.hidden_size, "h")
    each = widths(model, compute_of(recipe), batch)
    reason = "latest saved tensors, whose copies to the host may still run"
    return (sized(Kind.ACTIVATIONS, count, each.residual * each.tokens * width, reason, _STREAMS, f"r·T·{named}"),)


def buffers_and_pixels(model: ModelSpec, recipe: RecipeSpec, batch: Batch) -> tuple[Line, ...]:
    """Return the buffers that matter in memory, cast to the compute dtype, and the images of a batch. [bytes]"""
    buffers = held_buffers(model, layout(model), compute_of(recipe).element_bytes)
    return (*buffers, *pixels(model, batch))


def held_beside(model: ModelSpec, recipe: RecipeSpec, batch: Batch) -> tuple[Line, ...]:
    """Return what the loop and the model's layers hold beside the engine: pixels, and scales of rounded layers. [bytes]"""
    images = (*pixels(model, batch), *_in_flight(model, recipe, batch))
    if not (names := [one for one in ROUNDING if one in recipe.fused_parts]):
        return images
    from zeroplan.transformer.families.fake_quantised import scales_kept  # noqa: PLC0415  few jobs have it

    return (*images, *scales_kept(model, batch, names[0]))


def recompute_of(run: BlockRun, compute: Compute) -> Recompute:
    """Return how the backward recomputes the blocks of a run."""
    return "none" if run.plain else compute.recompute


def run_pass(model: ModelSpec, run: BlockRun, compute: Compute, batch: Batch) -> BlockPass:
    """Return one block of a run in one forward and backward pass."""
    if run.plain:
        compute = compute._replace(recompute="none")
    recomputed = compute.recompute == "full"  # full recomputation stops at the last saved tensor, selective runs to the end
    return block_pass(model, run.kind, compute, batch, recomputed=recomputed)
