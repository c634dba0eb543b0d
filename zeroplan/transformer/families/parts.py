"""What the parts of a block (norm, attention, MLP) have in common, and how they make a block."""

from typing import NamedTuple

from zeroplan.ledger import Kind, Line, Role, Tag
from zeroplan.transformer.blocks import BackwardPoint, BlockPass
from zeroplan.transformer.families.widths import Widths

SAVED = Kind.ACTIVATIONS
GRADIENT = Kind.ACTIVATION_GRADIENTS
TEMPORARY = Kind.TEMPORARY
BLOCK_INPUT, INCOMING = Tag(Role.BLOCK_INPUT), Tag(Role.INCOMING)
#: What a product read and keeps for the gradient of its weight.
OPERAND = Tag(Role.OPERAND)

LAYER = "transformers 5.23, models/llama/modeling_llama.py, LlamaDecoderLayer.forward"


class Part(NamedTuple):
    """One part of a block, as if it stood alone: what it saves, and where its backward can peak.

    ``points`` list what is alive of this part only; ``weights`` and ``casts`` are the elements of its weights, and of those
    that autocast copies.
    """

    saved: tuple[Line, ...]
    points: tuple[BackwardPoint, ...]
    weights: int
    casts: int


def assemble(
    x: Widths,
    parts: tuple[Part, Part, Part, Part],
    *,
    forward: tuple[Line, ...],
    recompute: tuple[Line, ...],
    selective: tuple[Line, ...],
    input_is_saved: bool,
) -> BlockPass:
    """Build a pre-norm block of two residual branches: norm, attention, norm, MLP."""
    block_input = Line(SAVED, x.residual * x.tokens * x.hidden, "block input", "r·T·h", LAYER, BLOCK_INPUT)
    saved = parts[0].saved + parts[1].saved + parts[2].saved + parts[3].saved
    return BlockPass(
        saved,
        (block_input,),
        (block_input, *selective),
        forward if input_is_saved else (block_input, *forward),
        recompute,
        _backward_points(x, parts),
        parts[1].casts + parts[3].casts,
        () if input_is_saved else (block_input,),
    )


def _backward_points(x: Widths, parts: tuple[Part, Part, Part, Part]) -> tuple[BackwardPoint, ...]:
    """List the parts' points in the order of the backward, each with what earlier parts still save and later parts produced.

    The gradient of the residual stream is alive throughout: it came in from the block above and goes out below.
    """
    first, attention, second, mlp = parts
    size = x.residual * x.tokens * x.hidden
    residual = (Line(GRADIENT, size, "gradient of the residual stream", "r·T·h", LAYER, INCOMING),)
    below_attention = residual + first.saved
    below_second = below_attention + attention.saved
    below_mlp = below_second + second.saved
    casts = attention.casts if x.autocast else 0
    after_second = second.weights + mlp.weights
    return (
        *_placed(mlp.points, below_mlp, 0, casts),
        *_placed(second.points, below_second, mlp.weights, casts),
        *_placed(attention.points, below_attention, after_second, 0),
        *_placed(first.points, residual, after_second + attention.weights, 0),
    )


def _placed(points: tuple[BackwardPoint, ...], below: tuple[Line, ...], gradients: int, casts: int) -> list[BackwardPoint]:
    return [
        point._replace(
            lines=below + point.lines,
            gradients=gradients + point.gradients,
            live_casts=casts + point.live_casts,
            handed_on=below + point.handed_on if point.handed_on else (),
            between=below + point.between if point.between else (),
            before=below + point.before if point.before else (),
        )
        for point in points
    ]
