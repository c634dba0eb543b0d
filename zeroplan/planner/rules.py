"""The rules that reject layouts. Each has a name, a sentence and a count."""

from enum import StrEnum
from typing import NamedTuple

from zeroplan.errors import SpecError


class NoLayoutError(SpecError):
    """No layout can be tried on this number of GPUs; another number may have some."""


class Rule(StrEnum):
    """Rules that reject layouts, in the order in which they apply."""

    DIVISIBILITY = "the micro-batch does not divide the batch of a GPU"
    PIPELINE = "the pipeline has fewer micro-batches than ranks, or a number that is no multiple of its ranks"
    BUBBLE = "several pipeline stages per rank would gain almost nothing, because one per rank already waits little"
    RESHARDING = "reshard_after_forward does not divide the ranks that shard, or is all of them"
    EXPERTS = "the ranks that have the same experts do not divide the widths of their weights"
    EMITTED = "the requested file cannot express it"
    ENGINE = "the engine refuses it, or it is not modelled"
    SLOW = "even a lower bound of the pipeline's step time is clearly above the time of a layout that fits"
    WEIGHTS = "the weights that it does not shard over all ranks do not fit the GPU"
    MEMORY = "it does not fit the GPU"
    TIGHT = "it fits, but not with the allocator's cache and the margin that a plan keeps free"


class Fallen(NamedTuple):
    """The number of layouts that a rule rejected, and the first message."""

    rule: Rule
    layouts: int
    example: str = ""


class Tally:
    """Counts rejected layouts."""

    def __init__(self) -> None:
        self._counts: dict[Rule, int] = {}
        self._examples: dict[Rule, str] = {}

    def cut(self, rule: Rule, layouts: int, example: str = "") -> None:
        """Count layouts that a rule rejected."""
        if layouts:
            self._counts[rule] = self._counts.get(rule, 0) + layouts
            self._examples.setdefault(rule, example)

    def has(self, rule: Rule) -> bool:
        """Whether a rule has rejected layouts."""
        return rule in self._counts

    @property
    def fallen(self) -> tuple[Fallen, ...]:
        """The rejected layouts by rule, in the order of the rules."""
        return tuple(Fallen(rule, self._counts[rule], self._examples[rule]) for rule in Rule if rule in self._counts)
