"""What of a block is alive in its backward when a gradient of its weights is handed on?"""

from collections.abc import Iterator
from typing import NamedTuple

from zeroplan.engines.sources import FLOWING
from zeroplan.ledger import Kind, Line, Role, total_bytes
from zeroplan.numeric import Int
from zeroplan.transformer.blocks import At, BackwardPoint, BlockPass, HeadPass

_TEMPORARY, _WORKSPACE = Kind.TEMPORARY, Kind.WORKSPACE


class Running(NamedTuple):
    """Of the block that runs in backward: its activations, and gradients of activations. [bytes]"""

    activations: Int
    gradients: Int

    @property
    def n_bytes(self) -> Int:
        """Both. [bytes]"""
        return self.activations + self.gradients


def running_of(lines: tuple[Line, ...]) -> Running:
    """Of these lines activations and their gradients."""
    flowing = total_bytes(tuple(flowing_lines(lines)))
    return Running(total_bytes(lines) - flowing, flowing)


def flowing_lines(lines: tuple[Line, ...]) -> Iterator[Line]:
    """The gradients of activations among them."""
    return (line for line in lines if line.kind is Kind.ACTIVATION_GRADIENTS)


def _lasting(point: BackwardPoint) -> list[Line]:
    """Return what is alive of a point without the temporaries of the operator that runs there."""
    return [line for line in point.lines if line.kind is not _TEMPORARY and line.kind is not _WORKSPACE]


def lines_between(block: BlockPass, index: int) -> list[Line]:
    """Return what is alive when a gradient is handed on that is made between the point before and this one."""
    known = block.points[index - 1].between if index else ()
    return list(known) or _lasting(block.points[index])


def settled_lines(block: BlockPass, index: int, flow: Line) -> list[Line]:
    """Return what is alive of a point when its operator is done and the gradient it made is handed on.

    Its temporaries are gone, and so is the input of a product whose gradient that is: autograd lets go of what it saved before it
    hands on what it made (torch 2.13, ``engine.cpp``, ``call_function`` and ``release_variables``). Before a norm, what flows
    has been added up to ``flow``, one gradient of a hidden state.
    """
    point = block.points[index]
    if point.handed_on:
        return list(point.handed_on)
    lines = _lasting(point)
    if not point.current_gradient or index + 1 == len(block.points):
        return lines
    after = block.points[index + 1]
    stay = {id(line) for line in after.lines}  # a tensor that is there at several points is one line
    lines = [line for line in lines if id(line) in stay or line.tag.role is not Role.OPERAND]
    if after.place.at is not At.NORM:
        return lines
    stay |= {id(line) for line in block.saved}
    return [*(line for line in lines if id(line) in stay), flow]


def flow_of(head: HeadPass) -> Line:
    """One gradient of a hidden state."""
    return Line(Kind.ACTIVATION_GRADIENTS, head.hidden_bytes, "gradient of a hidden state", head.hidden_formula, FLOWING)
