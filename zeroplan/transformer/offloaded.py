"""The memory of a checkpointed block whose saved input waits in host memory until its backward.

``offload_wrapper`` moves every tensor that a block's graph saves to host memory. A recomputed block's graph saves only its
input. Selective recomputation keeps its tensors in a dictionary outside the graph, so they stay on the GPU, as do tensors
that a checkpoint gets by keyword, such as rotary tables.
"""

from zeroplan.ledger import Line
from zeroplan.transformer.blocks import At, BackwardPoint, BlockPass, is_input, without_input

#: Source of what is moved and when it returns.
SAVED_ON_CPU = "torch 2.13, torch/autograd/graph.py, save_on_cpu"


def with_offloaded_input(block: BlockPass) -> BlockPass:
    """Return a recomputed block with its input in host memory.

    The input returns for the recomputation and is freed after it. If the block's first operator saves that tensor itself, the
    points of the backward already contain it. Source: torch 2.13, ``torch/utils/checkpoint.py``,
    ``_CheckpointFrame.get_inputs``.
    """
    back = tuple(filter(is_input, block.checkpoint_in_backward))
    points = tuple([_with_input(point, back) for point in block.points]) if back else block.points
    return block._replace(
        selective=without_input(block.selective),
        points=points,
        checkpoint_in_backward=without_input(block.checkpoint_in_backward),
        on_host=tuple(filter(is_input, block.checkpoint)),
    )


def _with_input(point: BackwardPoint, back: tuple[Line, ...]) -> BackwardPoint:
    return point._replace(lines=(*point.lines, *back)) if point.place.at is At.RUN_AGAIN else point
