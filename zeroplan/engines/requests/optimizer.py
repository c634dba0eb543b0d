"""An optimizer's step, request by request."""

from collections.abc import Sequence

from zeroplan.engines.optimizers import LocalTensor, state_lines, step_temporary_lines
from zeroplan.engines.requests.log import Log
from zeroplan.ledger import Line, total_bytes
from zeroplan.numeric import Int
from zeroplan.spec.recipe import Optimizer, OptimizerImpl


class Update:
    """The optimizer of a rank. Its first step makes its states."""

    def __init__(self, optimizer: Optimizer, impl: OptimizerImpl, width: int) -> None:
        """``width`` is that of what it updates. [bytes]"""
        self.optimizer, self.impl, self.width = optimizer, impl, width
        self.has_states = False

    def step(self, log: Log, tensors: Sequence[tuple[Int, ...]]) -> None:
        """One step over tensors of these shapes."""
        each = [LocalTensor(shape) for shape in tensors]
        if not self.has_states:
            for tensor in each:
                self._request(log, "states", state_lines(self.optimizer, self.impl, (tensor,), self.width))
            self.has_states = True
        every = step_temporary_lines(self.optimizer, self.impl, each, self.width)
        apart = [step_temporary_lines(self.optimizer, self.impl, (tensor,), self.width) for tensor in each]
        if sum(int(total_bytes(lines)) for lines in apart) == int(total_bytes(every)):
            for lines in apart:
                self._request(log, "temporaries", lines)
        else:
            self._request(log, "temporaries", every)
        log.release("temporaries")

    @staticmethod
    def _request(log: Log, key: str, lines: tuple[Line, ...]) -> None:
        for line in lines:
            log.request(key, int(line.n_bytes), line.kind, line.reason)
