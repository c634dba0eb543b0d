"""An optimizer's step, request by request."""

from collections.abc import Iterable, Sequence

from zeroplan.engines.muon import step_of, updated_by_muon
from zeroplan.engines.optimizers import (
    LocalTensor,
    foreach_copies,
    needs_of,
    state_lines,
    states_from_the_start,
    step_counters,
    step_temporary_lines,
)
from zeroplan.engines.requests.log import Log, Piece
from zeroplan.ledger import Among, Kind, Line
from zeroplan.memo import Computed
from zeroplan.numeric import Int
from zeroplan.spec.recipe import Optimizer, OptimizerImpl

Tensors = Sequence[LocalTensor | tuple[Int, ...]]
"""The tensors that an optimizer updates; tensors outside the blocks may be given by their shapes."""


class Update:
    """The optimizer of a rank. Its first step makes its states."""

    def __init__(self, optimizer: Optimizer, impl: OptimizerImpl, width: int) -> None:
        """``width``: bytes of an element of the updated tensors."""
        self.optimizer, self.impl, self.width = optimizer, impl, width
        self.has_states = False
        self._of_states = Computed(self._states)
        self._temporaries: list[Piece] = []
        """The temporaries of a step; with copies of tensors, one copy of each."""

    def begin(self, log: Log, tensors: Tensors) -> None:
        """Build the optimizer on these tensors."""
        if states_from_the_start(self.optimizer):
            self.make_states(log, tensors)

    def make_states(self, log: Log, tensors: Tensors) -> None:
        """Request the states of these tensors, unless they exist."""
        if self.has_states:
            return
        every = list(_each(tensors))
        log.put_all("states", _pieces([line for tensor in every for line in self._of_states[tensor]]))
        if needs_of(self.optimizer).tables:  # all tensors share them
            log.put("states", state_lines(self.optimizer, self.impl, every, self.width)[-1])
        self.has_states = True

    def step(self, log: Log, tensors: Tensors) -> None:
        """Run one step over these tensors, the same in every step."""
        self.make_states(log, tensors)
        if self.optimizer == "muon":
            self._step_of_muon(log, list(_each(tensors)))
            return
        copies = foreach_copies(self.optimizer, self.impl)
        if not self._temporaries:
            every, of = list(_each(tensors)), Computed(self._of_step)
            lines = [of[tensor,][0] for tensor in every] if copies else self._of_step(tuple(every))
            self._temporaries = _pieces(lines, copies or 1)
        for _ in range(copies or 1):
            log.put_all("temporaries", self._temporaries)
        log.release("temporaries")

    def _step_of_muon(self, log: Log, tensors: list[LocalTensor]) -> None:
        """Update matrices with Muon one by one, then all other tensors with AdamW at once."""
        kind = Kind.OPTIMIZER_TEMPORARY
        for tensor in filter(updated_by_muon, tensors):
            for one in step_of(tensor, self.width):
                if one.sends:
                    among = (tensor.replicas, Among.REPLICAS) if one.over_replicas else (tensor.ranks, Among.SHARDS)
                    log.call(one.name, one.n_bytes, *among)
                else:
                    log.request(one.name, one.n_bytes, kind, "step: Newton-Schulz iterates of a matrix")
                    log.release(*(() if one.n_bytes else (one.name,)))
        log.release("result")
        for tensor in tensors:
            if not updated_by_muon(tensor):
                log.request("temporaries", self.width * int(tensor.numel), kind, "step: AdamW's denominators")
        log.release("temporaries")

    def _states(self, tensor: LocalTensor) -> tuple[Line, ...]:
        """Return the states of one tensor."""
        held = zip(state_lines(self.optimizer, self.impl, (tensor,), self.width), needs_of(self.optimizer).states, strict=False)
        lines = [line._replace(n_bytes=line.n_bytes // one.alike) for line, one in held for _ in range(one.alike)]
        return *lines, *step_counters(self.optimizer, self.impl, 1)

    def _of_step(self, tensors: tuple[LocalTensor, ...]) -> tuple[Line, ...]:
        return step_temporary_lines(self.optimizer, self.impl, tensors, self.width)


def _pieces(lines: Iterable[Line], copies: int = 1) -> list[Piece]:
    return [(int(line.n_bytes // copies), line.kind, line.reason, False) for line in lines]


def _each(tensors: Tensors) -> Iterable[LocalTensor]:
    return (one if isinstance(one, LocalTensor) else LocalTensor(one, in_block=False) for one in tensors)
