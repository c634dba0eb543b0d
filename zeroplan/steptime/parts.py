"""The result type of step time: a part of the step with its seconds and its reason, as a ledger's line has its bytes."""

from enum import StrEnum
from typing import NamedTuple

from zeroplan.numeric import Float, together


class Does(StrEnum):
    """What a GPU does in a part of a step."""

    COMPUTING = "computing"
    STEPPING = "stepping"
    """The optimizer's own arithmetic."""
    SENDING = "sending"
    """It sends, or waits for what others send."""
    SENDING_AT_STEP = "sending around the optimizer's step"
    COPYING = "copying"
    """To host memory, and from it."""
    IDLING = "idling"
    """It has nothing to do until a pipeline is full."""


class Part(NamedTuple):
    """A part of a step and why it takes that long; what is hidden behind other parts is named, and not added up."""

    name: str
    seconds: Float
    """What it adds to the step."""
    hidden_s: Float
    """What of it goes on behind the other parts."""
    reason: str
    source: str
    does: Does = Does.COMPUTING


class StepTime(NamedTuple):
    """The time of one optimizer step on one GPU, part by part."""

    parts: tuple[Part, ...]
    model_flops: Float
    """What the model's formula asks of one GPU: no recomputation, causal attention. [FLOPs]"""
    tokens: Float
    """Of one GPU."""
    peak_flops_per_s: float

    @property
    def seconds(self) -> Float:
        """The whole step. [s]"""
        return together(part.seconds for part in self.parts)

    @property
    def tokens_per_s(self) -> Float:
        """Of one GPU. [tokens/s]"""
        return self.tokens / self.seconds

    @property
    def mfu(self) -> Float:
        """Share of the dense peak that the model's own operations use, the masked half of attention left out."""
        return self.model_flops / (self.seconds * self.peak_flops_per_s)
