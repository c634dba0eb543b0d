"""What an engine answers: states, moments and collectives of one training step."""

from collections.abc import Sequence
from typing import NamedTuple

from zeroplan.ledger import Collective, Line, Moment
from zeroplan.numeric import Int


class Symbol(NamedTuple):
    """A symbol that the formulas of an account use: what it represents, and its number in this job."""

    name: str
    value: Int
    meaning: str


class PipelineRank(NamedTuple):
    """One rank of a pipeline: which stages it has, and its highest moment."""

    rank: int
    """Its place in the pipeline, from 0."""
    stages: str
    """Its layers, counted from 1, and what stands before and after them."""
    parameters: int
    """Of its stages, before they are sharded. [elements]"""
    peak_bytes: Int
    """The most that its tensors take, library workspaces left out."""
    moment: str
    """When that is."""


class Account(NamedTuple):
    """The memory and traffic of one rank in the steady state of a training step.

    ``states``: parameters, gradients and optimizer state as the engine keeps them; ``moments``: the named moments of a step,
    each with every line alive then (states included as far as they exist at that moment); ``collectives``: what is sent per
    step; ``host``: host memory per rank, empty unless something is offloaded; ``nvme``: files per rank; ``symbols``: what the
    formulas of these lines use beyond the legend of the model; ``notes``: what a reader would trip over, a sentence each;
    ``kept``: what one block of each kind keeps for its backward, where the moments give it as one line; ``pipeline``: every
    rank of a pipeline, the one whose account this is first.
    """

    states: tuple[Line, ...]
    moments: Sequence[Moment]
    collectives: tuple[Collective, ...]
    host: tuple[Line, ...] = ()
    symbols: tuple[Symbol, ...] = ()
    notes: tuple[str, ...] = ()
    kept: tuple[tuple[str, tuple[Line, ...]], ...] = ()
    nvme: tuple[Line, ...] = ()
    pipeline: tuple[PipelineRank, ...] = ()
