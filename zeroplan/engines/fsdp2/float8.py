"""Weights that ranks gather in float8: torchao's all-gather under FSDP2.

A rank casts its shard of each linear layer's weight before the all-gather, with one scale for the whole matrix. So the ranks
first find the largest absolute value together. The buffer and the unsharded weight take a byte per element.
"""

from zeroplan.engines.fsdp2.groups import Group, ParamGroup
from zeroplan.ledger import Collective, Kind, Line, Phase
from zeroplan.numeric import Int, ceil_div, maximum, where
from zeroplan.transformer.parameters import Parameter

GATHER = "torchao 0.18, float8/fsdp_utils.py, WeightWithDynamicFloat8CastTensor.fsdp_pre_all_gather"
_CAST = 9
"""Bytes per element while a shard is cast: in fp32, scaled and then clamped, and in float8."""


def gathered_in_float8(group: Group, parameters: tuple[Parameter, ...], n: Int) -> Group:
    """Return a block's group whose matrices ``n`` ranks gather in float8."""
    done: Int = 0
    most: Int = 0
    before: Int = 0
    for one in filter(_is_matrix, parameters):
        shard = ceil_div(one.shape[0], n) * (one.numel // one.shape[0])
        most, done = maximum(most, done + before + _CAST * shard), done + shard
        before = where(n == 1, shard, 0)  # a single rank copies each before it casts the next
    ahead, late = where(n > 1, most, 0), where(n > 1, 0, most)
    return group._replace(in_float8=n * done, casting=ahead, casting_late=late, alone=0)


def _is_matrix(parameter: Parameter) -> bool:
    return len(parameter.shape) > 1


def casting(group: ParamGroup) -> Line:
    """Return the most that casts of a group's shards take before their all-gather, one after the other. [bytes]"""
    return _casting(group, group.of.casting)


def casting_late(group: ParamGroup) -> Line:
    """Return the same of a single rank. It has no all-gather, so it casts when it copies the group out. [bytes]"""
    return _casting(group, group.of.casting_late)


def _casting(group: ParamGroup, n_bytes: Int) -> Line:
    words = f"{group.words}, this rank's chunk while it is cast to float8"
    return Line(Kind.GATHER, n_bytes, words, group.said(n_bytes, str(n_bytes)), GATHER)


def largest_values(
    parameters: tuple[Parameter, ...], width: int, gathers: Int, words: str, n: Int, phase: Phase
) -> Collective:  # fmt: skip
    """Return the all-reduces of each matrix's largest absolute value, ``width`` bytes, before so many all-gathers of a block."""
    calls: Int = gathers * len(list(filter(_is_matrix, parameters)))
    sent: Int = 2 * calls * ceil_div(width, n) * (n - 1)
    what = f"largest absolute values of {words}"
    return Collective("all_reduce", what, phase.value, n, calls, width, sent, where(n > 1, 2 * calls, 0), GATHER, phase=phase)
