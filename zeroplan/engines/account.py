"""What an engine says about a job: the states it keeps, the moments of a step, the collectives, and host memory."""

from __future__ import annotations

from typing import NamedTuple

from zeroplan.ledger import Collective, Line, Moment


class Account(NamedTuple):
    """The memory and traffic of one GPU in the steady state of training.

    ``states``: parameters, gradients and optimizer state; ``moments``: every moment that can be the highest of a step, each
    with every line alive then, states included as far as they are alive; ``host``: host memory, empty unless offloaded.
    """

    states: tuple[Line, ...]
    moments: tuple[Moment, ...]
    collectives: tuple[Collective, ...]
    host: tuple[Line, ...] = ()
