"""The result of an engine's estimate: states, moments and collectives of one training step."""

from collections.abc import Sequence
from typing import NamedTuple

from zeroplan.ledger import Collective, Line, Moment
from zeroplan.numeric import Int


class Symbol(NamedTuple):
    """A symbol in the formulas of an account: its meaning, and its value in this job."""

    name: str
    value: Int
    meaning: str


class PipelineRank(NamedTuple):
    """One rank of a pipeline: its stages and its peak."""

    rank: int
    """Its position in the pipeline, from 0."""
    stages: str
    """Its layers, counted from 1, and the parts of the model before and after them."""
    parameters: int
    """Parameters of its stages, before sharding. [elements]"""
    peak_bytes: Int
    """The peak of its tensors, without library workspaces."""
    moment: str
    """The name of the moment of the peak."""


class Account(NamedTuple):
    """The memory and traffic of one rank in the steady state of a training step.

    ``states``: parameters, gradients and optimizer state as the engine keeps them; ``moments``: the named moments of a step,
    each with every line alive then (including the states that exist at that moment); ``collectives``: the traffic per step;
    ``host``: host memory per rank, empty without offload; ``nvme``: files per rank; ``symbols``: symbols of these lines'
    formulas that the model's legend lacks; ``notes``: what would surprise a reader, one sentence each; ``kept``: the tensors
    that one block of each kind keeps for its backward, if the moments list them as one line; ``pipeline``: all ranks of a
    pipeline, first the rank of this account.
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
