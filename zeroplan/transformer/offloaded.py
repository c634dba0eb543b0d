"""What does a block cost whose checkpoint is in host memory between its forward and its backward?

``offload_wrapper`` saves every tensor of a block's graph in host memory. Of a block that is recomputed that is its input alone:
what the checkpoint itself sees is not saved, and what selective recomputation keeps is held by a dictionary, not by the graph.
"""

from zeroplan.ledger import Line
from zeroplan.transformer.blocks import At, BackwardPoint, BlockPass

#: What is moved, and when it comes back.
SAVED_ON_CPU = "torch 2.13, torch/autograd/graph.py, save_on_cpu"


def input_away(block: BlockPass) -> BlockPass:
    """The same block, recomputed in part or whole, with its input in host memory.

    The input comes back for the recomputation and goes with it, unless the block's first operator saves that very tensor, which
    the points of its backward count then. Source: torch 2.13, ``torch/utils/checkpoint.py``, ``_CheckpointFrame.get_inputs``.
    """
    back = block.checkpoint_in_backward
    points = tuple([_with_input(point, back) for point in block.points]) if back else block.points
    return block._replace(selective=block.selective[1:], points=points, checkpoint_in_backward=(), away=block.checkpoint)


def _with_input(point: BackwardPoint, back: tuple[Line, ...]) -> BackwardPoint:
    """Have the input beside what the recomputation has made; it is gone at any other point."""
    return point._replace(lines=(*point.lines, *back)) if point.place.at is At.RUN_AGAIN else point
