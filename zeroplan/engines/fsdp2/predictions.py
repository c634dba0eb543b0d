"""The lines of NeMo AutoModel's multi-token prediction in an FSDP2 step, outside its blocks.

:mod:`zeroplan.transformer.predictions` has most of them. Without ``predictions`` in the model all are empty.
"""

from zeroplan.engines.formulas import sized
from zeroplan.engines.fsdp2.plan import Plan
from zeroplan.ledger import Kind, Line

EXPERTS = "NeMo AutoModel 36044ad3, components/moe/parallelizer.py, apply_fsdp (experts_reshard_after_forward)"


def beside(plan: Plan) -> tuple[Line, ...]:
    """Return what is alive from its first block's forward to that block's backward: also experts that stay gathered. [bytes]"""
    return () if plan.head.ahead is None else (*plan.head.ahead.beside, *_experts(plan))


def _experts(plan: Plan) -> tuple[Line, ...]:
    """Return the gathered experts of its blocks, unless all blocks stay gathered anyway. [bytes]"""
    if plan.reshard is False:
        return ()
    reason, width = "experts of the predictions, unsharded until their backward", plan.width.compute
    return tuple(
        sized(Kind.UNSHARDED_PARAMETERS, run.layers, width * group.experts.padded, reason, EXPERTS, f"{width}·X_{group.symbol}")
        for run, group in zip(plan.runs, plan.blocks, strict=True)
        if run.kind.endswith("ahead") and group.experts is not None
    )  # fmt: skip


def forward(plan: Plan) -> tuple[Line, ...]:
    """Return what the predictions add to the losses' forward. [bytes]"""
    return () if plan.head.ahead is None else plan.head.ahead.forward


def backward(plan: Plan) -> tuple[Line, ...]:
    """Return what the predictions add to the backward of losses, head and final norm. [bytes]"""
    return () if plan.head.ahead is None else plan.head.ahead.backward


def left(plan: Plan) -> tuple[Line, ...]:
    """Return what stays to the backward's end: hidden states, and the embedding's gradient from the predictions. [bytes]"""
    return () if plan.head.ahead is None else plan.head.ahead.left
