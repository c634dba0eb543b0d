"""What an engine answers: states, moments and collectives of one training step."""

from __future__ import annotations

from typing import NamedTuple

from zeroplan.ledger import Collective, Line, Moment


class Account(NamedTuple):
    """The memory and traffic of one rank in the steady state of a training step.

    ``states``: parameters, gradients and optimizer state as the engine keeps them; ``moments``: the named moments of a step, each
    with every line alive then (states included as far as they exist at that moment); ``collectives``: what is sent per step;
    ``host``: host memory per rank, empty unless something is offloaded.
    """

    states: tuple[Line, ...]
    moments: tuple[Moment, ...]
    collectives: tuple[Collective, ...]
    host: tuple[Line, ...] = ()
