"""The result type of step time: a part of the step with its seconds and its reason."""

from enum import StrEnum
from typing import NamedTuple

from zeroplan.numeric import Float, together


class Does(StrEnum):
    """A GPU's activity in a part of a step."""

    COMPUTING = "computing"
    STEPPING = "stepping"
    """The optimizer's own computing."""
    SENDING = "sending"
    """It sends, or waits for data that other ranks send."""
    SENDING_AT_STEP = "sending around the optimizer's step"
    COPYING = "copying"
    """It copies to or from host memory."""
    IDLING = "idling"
    """It idles until a pipeline is full."""


class Part(NamedTuple):
    """A part of a step and its reason. Time hidden behind other parts is listed, and left out of the sum."""

    name: str
    seconds: Float
    """Time added to the step."""
    hidden_s: Float
    """Time hidden behind other parts."""
    reason: str
    source: str
    does: Does = Does.COMPUTING


class StepTime(NamedTuple):
    """The time of one optimizer step on one GPU, part by part."""

    parts: tuple[Part, ...]
    model_flops: Float
    """Operations of the model's formula on one GPU: causal attention, no recomputation, no gradients of frozen weights. [FLOPs]"""
    tokens: Float
    """Tokens of one GPU."""
    peak_flops_per_s: float

    @property
    def seconds(self) -> Float:
        """The whole step. [s]"""
        return together(part.seconds for part in self.parts)

    @property
    def tokens_per_s(self) -> Float:
        """Tokens per second of one GPU."""
        return self.tokens / self.seconds

    @property
    def mfu(self) -> Float:
        """Share of the dense peak that the model's own operations use, without the masked half of attention."""
        return self.model_flops / (self.seconds * self.peak_flops_per_s)
