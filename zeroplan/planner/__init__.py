"""Which layout that fits is the best, and why? ``search.py`` evaluates layouts, ``choose.py`` compares them.

The search covers what the memory model covers: engines and stages, replicas, tensor, context, pipeline and expert parallelism,
recomputation, micro-batches, optimizer implementations, the chunked loss, offload.
"""

from zeroplan.planner.choose import plan
from zeroplan.planner.questions import cheapest, fewest_gpus, largest_batch, largest_model, longest_sequence
from zeroplan.planner.result import Best, Layout, More, Plan, Rival
from zeroplan.planner.space import Fixed

__all__ = [
    "Best",
    "Fixed",
    "Layout",
    "More",
    "Plan",
    "Rival",
    "cheapest",
    "fewest_gpus",
    "largest_batch",
    "largest_model",
    "longest_sequence",
    "plan",
]
