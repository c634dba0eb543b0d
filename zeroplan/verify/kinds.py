"""What is each block of memory for? Judged by whose tensor it is, and by the operator that asked for it."""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from zeroplan.ledger import Kind
from zeroplan.verify.allocations import Allocation, Timeline

#: Operators inside which an engine or an optimizer asks for buffers of one kind; the first that matches decides.
_BY_OPERATOR: tuple[tuple[str, Kind], ...] = (
    ("FSDP::all_gather_copy_out", Kind.UNSHARDED_PARAMETERS),
    ("FSDP::all_gather", Kind.GATHER),
    ("FSDP::post_backward_reduce", Kind.REDUCE),
    ("Optimizer.step", Kind.OPTIMIZER_TEMPORARY),
)
_LOSS = ("aten::log_softmax", "aten::nll_loss_nd", "aten::cross_entropy_loss")


class Owned(NamedTuple):
    """Whose tensors stand at which addresses, at a moment."""

    mark: str
    kinds: dict[int, Kind]


def owned(mark: str, module: nn.Module, optimizer: torch.optim.Optimizer | None, more: Iterable[tuple[Kind, object]] = ()) -> Owned:
    """Note the addresses of parameters, gradients and optimizer state; nothing is requested and nothing kept."""
    kinds: dict[int, Kind] = {}
    for kind, value in more:
        _note(kinds, kind, value)
    groups = [] if optimizer is None else [group["params"] for group in optimizer.param_groups]
    parameters = [*module.parameters(), *(parameter for group in groups for parameter in group)]
    state = {} if optimizer is None else optimizer.state
    _note(kinds, Kind.OPTIMIZER_STATE, list(state.values()))
    _note(kinds, Kind.GRADIENTS, [parameter.grad for parameter in parameters])
    _note(kinds, Kind.PARAMETERS, [*module.buffers(), *parameters])
    return Owned(mark, kinds)


def _note(kinds: dict[int, Kind], kind: Kind, value: object) -> None:
    """Note every tensor in a value; a later note of the same address wins."""
    if isinstance(value, DTensor):
        _note(kinds, kind, value._local_tensor)  # noqa: SLF001  to_local() would make a view
    elif isinstance(value, torch.Tensor):
        kinds[value.untyped_storage().data_ptr()] = kind
    elif isinstance(value, dict):
        _note(kinds, kind, list(value.values()))
    elif isinstance(value, (list, tuple)):
        for one in value:
            _note(kinds, kind, one)


class Judge:
    """Says what a block is for, once the run is over.

    Blocks are told apart by address and time of request. Whose a block is was noted at a few moments (:func:`owned`); what a
    forward leaves behind for its backward is activations, of the loss and of the vocabulary's width logits; the rest is known by
    operator, or stays a temporary.
    """

    def __init__(self, timeline: Timeline, notes: Iterable[Owned], *, forwards: Iterable[tuple[str, str]], logits: set[int],
                 standing: Kind | None) -> None:  # fmt: skip
        self._kinds: dict[tuple[int, int], Kind] = {}
        self._logits = logits
        for start, end in forwards:
            for block in timeline.alive(timeline.marks[end]):
                if block.time_ns >= timeline.marks[start]:
                    self._kinds[block.address, block.time_ns] = self._kept(block)
        if standing is not None:
            for block in timeline.alive(timeline.marks["finished"]):
                self._kinds[block.address, block.time_ns] = standing
        for note in notes:
            for block in timeline.alive(timeline.marks[note.mark]):
                kind = note.kinds.get(block.address)
                if kind is not None:
                    self._kinds[block.address, block.time_ns] = kind

    def ledger(self, blocks: Iterable[Allocation]) -> dict[str, int]:
        """Bytes of the blocks by kind, the largest first."""
        sums: dict[str, int] = {}
        for block in blocks:
            kind = self.kind(block).value
            sums[kind] = sums.get(kind, 0) + block.n_bytes
        return dict(sorted(sums.items(), key=lambda item: -item[1]))

    def kind(self, block: Allocation) -> Kind:
        """What one block is for."""
        known = self._kinds.get((block.address, block.time_ns))
        return known if known is not None else self._by_operator(block, Kind.TEMPORARY)

    def _kept(self, block: Allocation) -> Kind:
        of_the_loss = block.n_bytes in self._logits or any(name in _LOSS for name in block.operators)
        return self._by_operator(block, Kind.LOGITS if of_the_loss else Kind.ACTIVATIONS)

    def _by_operator(self, block: Allocation, otherwise: Kind) -> Kind:
        for beginning, kind in _BY_OPERATOR:
            if any(name.startswith(beginning) for name in block.operators):
                return kind
        return Kind.LOGITS if block.n_bytes in self._logits else otherwise
