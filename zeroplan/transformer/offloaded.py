"""The memory of a block whose checkpoint is in host memory between its forward and its backward.

``offload_wrapper`` saves every tensor of a block's graph in host memory. The graph of a recomputed block saves only its input. What
selective recomputation keeps is in a dictionary, not in the graph.
"""

from zeroplan.ledger import Line
from zeroplan.transformer.blocks import At, BackwardPoint, BlockPass

#: Source of what moves, and of when it returns.
SAVED_ON_CPU = "torch 2.13, torch/autograd/graph.py, save_on_cpu"


def input_away(block: BlockPass) -> BlockPass:
    """Return the same block, recomputed in part or whole, with its input in host memory.

    The input returns for the recomputation and is freed after it, unless the block's first operator saves that tensor itself: then
    the points of the backward contain it. Source: torch 2.13, ``torch/utils/checkpoint.py``, ``_CheckpointFrame.get_inputs``.
    """
    back = block.checkpoint_in_backward
    points = tuple([_with_input(point, back) for point in block.points]) if back else block.points
    return block._replace(selective=block.selective[1:], points=points, checkpoint_in_backward=(), away=block.checkpoint)


def _with_input(point: BackwardPoint, back: tuple[Line, ...]) -> BackwardPoint:
    """Add the input to a point of the recomputation; it is not alive at other points."""
    return point._replace(lines=(*point.lines, *back)) if point.place.at is At.RUN_AGAIN else point
