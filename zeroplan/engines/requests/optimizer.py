"""An optimizer's step, request by request."""

from collections.abc import Sequence

from zeroplan.engines.optimizers import (
    LocalTensor,
    foreach_copies,
    state_lines,
    states_from_the_start,
    step_temporary_lines,
)
from zeroplan.engines.requests.log import Log
from zeroplan.ledger import Line
from zeroplan.numeric import Int
from zeroplan.spec.recipe import Optimizer, OptimizerImpl


class Update:
    """The optimizer of a rank. Its first step makes its states."""

    def __init__(self, optimizer: Optimizer, impl: OptimizerImpl, width: int) -> None:
        """``width`` is that of what it updates. [bytes]"""
        self.optimizer, self.impl, self.width = optimizer, impl, width
        self.has_states = False
        self._of_states: dict[tuple[Int, ...], tuple[Line, ...]] = {}
        self._of_steps: dict[tuple[Int, ...], tuple[Line, ...]] = {}

    def begin(self, log: Log, tensors: Sequence[tuple[Int, ...]]) -> None:
        """The optimizer is built over tensors of these shapes."""
        if states_from_the_start(self.optimizer):
            self.make_states(log, tensors)

    def make_states(self, log: Log, tensors: Sequence[tuple[Int, ...]]) -> None:
        """The states of tensors of these shapes, unless they are there."""
        for shape in () if self.has_states else tensors:
            self._request(log, "states", self._states(shape))
        self.has_states = True

    def step(self, log: Log, tensors: Sequence[tuple[Int, ...]]) -> None:
        """One step over tensors of these shapes."""
        self.make_states(log, tensors)
        copies = foreach_copies(self.optimizer, self.impl)
        for _ in range(copies):
            for shape in tensors:
                (line,) = self._temporaries(shape)
                self._request(log, "temporaries", (line._replace(n_bytes=line.n_bytes // copies),))
        if not copies:
            each = [LocalTensor(shape) for shape in tensors]
            self._request(log, "temporaries", step_temporary_lines(self.optimizer, self.impl, each, self.width))
        log.release("temporaries")

    def _states(self, shape: tuple[Int, ...]) -> tuple[Line, ...]:
        """Of one tensor; layers have tensors of the same shapes."""
        if shape not in self._of_states:
            self._of_states[shape] = state_lines(self.optimizer, self.impl, (LocalTensor(shape),), self.width)
        return self._of_states[shape]

    def _temporaries(self, shape: tuple[Int, ...]) -> tuple[Line, ...]:
        if shape not in self._of_steps:
            self._of_steps[shape] = step_temporary_lines(self.optimizer, self.impl, (LocalTensor(shape),), self.width)
        return self._of_steps[shape]

    @staticmethod
    def _request(log: Log, key: str, lines: tuple[Line, ...]) -> None:
        for line in lines:
            log.request(key, int(line.n_bytes), line.kind, line.reason)
