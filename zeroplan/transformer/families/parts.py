"""What the parts of a block (norm, attention, MLP) have in common, and how they make a block."""

from __future__ import annotations

from typing import NamedTuple

from zeroplan.ledger import Kind, Line
from zeroplan.transformer.blocks import BackwardPoint
from zeroplan.transformer.families.widths import Widths

SAVED = Kind.ACTIVATIONS
GRADIENT = Kind.ACTIVATIONS
TEMPORARY = Kind.TEMPORARY


class Part(NamedTuple):
    """One part of a block, as if it stood alone: what it saves, and where its backward can peak.

    ``points`` list what is alive of this part only; ``weights`` and ``casts`` are the elements of its weights, and of those
    that autocast copies.
    """

    saved: tuple[Line, ...]
    points: tuple[BackwardPoint, ...]
    weights: int
    casts: int


def saved_by(parts: tuple[Part, ...]) -> tuple[Line, ...]:
    """Everything the parts save, in program order."""
    return tuple(line for part in parts for line in part.saved)


def backward_points(x: Widths, parts: tuple[Part, ...]) -> tuple[BackwardPoint, ...]:
    """The parts' points in the order of the backward, each with what earlier parts still save and later parts produced.

    The gradient of the residual stream is alive throughout: it came in from the block above and goes out below.
    """
    residual = Line(GRADIENT, x.residual * x.tokens * x.hidden, "gradient of the residual stream", "r·T·h")
    points: list[BackwardPoint] = []
    gradients = 0
    for position in range(len(parts) - 1, -1, -1):
        part, before = parts[position], parts[:position]
        outside = (*saved_by(before), residual)
        casts = sum(earlier.casts for earlier in before)
        points += [
            BackwardPoint(
                point.name, outside + point.lines, gradients + point.gradients, point.current_gradient, casts + point.live_casts
            )
            for point in part.points
        ]
        gradients += part.weights
    return tuple(points)
