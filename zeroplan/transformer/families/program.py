"""What a block's program branches on."""

from typing import NamedTuple

from zeroplan.transformer.families.attend import Attention


class Block(NamedTuple):
    """The structure of one block, beside its dtypes."""

    attend: Attention
    grouped: bool
    """Several query heads share a key/value head."""
    one_key: bool
    """There is a single key/value head."""
    attention_bias: bool
    head_norms: bool
    """Queries and keys are normalised over each head."""
    parallel: bool = True
    """Attention and MLP read the same input, where a family may have it so."""
    fast_gelu: bool = False
    """GELU is ``gelu_fast``, written out in single operators."""
    dispatched: bool = False
    """Experts are on several ranks."""
    alone: bool = False
    """There is no block below."""
