"""The parameter groups of a ``fully_shard`` unit: what FSDP2 gathers, copies out and reduces together.

A unit has one group, or two where expert parallelism shards a block's experts among fewer ranks than the rest of it (torch 2.13,
_fsdp_param_group.py, FSDPParamGroup).
"""

from typing import NamedTuple

from zeroplan.engines.formulas import product
from zeroplan.engines.fsdp2.groups import Group
from zeroplan.numeric import Int


class ParamGroup(NamedTuple):
    """One parameter group. [elements]"""

    shard: Int
    """This rank's chunks."""
    padded: Int
    """All ranks' chunks: the size of an all-gather buffer."""
    numel: int
    """Without padding: what autograd's gradients measure."""
    whole: str
    """What formulas call ``padded``."""
    share: str
    """What formulas call ``shard``."""
    plain: str
    """What formulas call ``numel``."""
    gathers: Int
    """1 where another rank has a chunk, else 0."""
    gate: str
    """What formulas call ``gathers``, as a last factor."""
    words: str
    """Whose parameters a line says they are."""
    ranks: Int
    """Those that share it."""
    narrow: Int = 0
    """1 where the parameters are sharded along dim 1, else 0."""
    by_the_way: int = 0
    """What casting experts one after the other takes beside all of them, where a rank gathers nothing."""
    last: int = 0
    """Of the last parameter."""
    are_experts: bool = False
    in_numbers: bool = False
    """Formulas write bytes, since stages of a pipeline are of several sizes and have no symbols."""

    def said(self, n_bytes: Int, formula: str) -> str:
        """The formula of so many bytes."""
        return product(1, n_bytes) if self.in_numbers else formula


def param_groups(group: Group, gathers: Int, words: str, ranks: Int, *, in_numbers: bool = False) -> tuple[ParamGroup, ...]:
    """A unit's parameter groups, in the order in which they are gathered in forward."""
    symbol = group.symbol
    if group.experts is None:
        names = f"P_{symbol}", f"P_{symbol}/N", f"G_{symbol}"
        sizes = group.shard, group.padded, group.numel
        return (ParamGroup(*sizes, *names, gathers, "·min(1, N-1)", words, ranks, in_numbers=in_numbers),)
    one, rest = group.experts, group.beside_experts
    names = f"D_{symbol}", f"D_{symbol}/N", f"(G_{symbol} - Y_{symbol})"
    beside = ParamGroup(
        rest.shard, rest.padded, rest.numel, *names, 1, "", "this block's beside its experts", ranks, in_numbers=in_numbers
    )
    experts = ParamGroup(
        one.shard, one.padded, one.numel, f"X_{symbol}", f"X_{symbol}/F", f"Y_{symbol}", one.gathers, "·min(1, F-1)",
        "this block's experts", one.ranks, one.narrow, one.by_the_way, one.last, are_experts=True, in_numbers=in_numbers,
    )  # fmt: skip
    return beside, experts
