"""How much GPU memory does each phase of a fine-tuning loop need, and which phase needs most? Start at ``loop.py``.

The phases of a loop run one after another on the same GPU. Training is an ordinary job; a reference model or a rollout engine may
stay on the GPU beside it. Names and defaults are those of TRL 1.16.
"""

from zeroplan.workflow.loop import loop_of, loop_of_file
from zeroplan.workflow.options import WORKFLOWS, WorkflowOptions
from zeroplan.workflow.phases import Loop, LoopPhase

__all__ = ["WORKFLOWS", "Loop", "LoopPhase", "WorkflowOptions", "loop_of", "loop_of_file"]
