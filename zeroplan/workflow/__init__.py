"""What does each phase of a fine-tuning loop take of a GPU, and which phase is the one that breaks?

A loop is phases that take turns on the same GPU: training is an ordinary job, and a reference model or a rollout engine stays
beside it or works alone. The words and defaults are those of TRL 1.16.
"""

from zeroplan.workflow.asked import WORKFLOWS, Asked
from zeroplan.workflow.loop import loop_of
from zeroplan.workflow.phases import Loop, LoopPhase

__all__ = ["WORKFLOWS", "Asked", "Loop", "LoopPhase", "loop_of"]
