"""The moments of a pipeline rank: each kind of pass through each of its stages, with the tensors that wait meanwhile.

Under a schedule FSDP2 reduces gradients only after all micro-batches. Whole gradients accumulate, and a stage stays unsharded
after a backward (torch 2.13, ``torch/distributed/pipelining/stage.py``, ``backward_maybe_with_nosync`` and
``perform_reduce_grad``).
"""

from collections.abc import Callable, Iterable, Iterator

from zeroplan.engines.pipeline.passes import through
from zeroplan.engines.pipeline.reducing import reducing
from zeroplan.engines.pipeline.waiting import Rank, most_waits
from zeroplan.engines.pipeline.walk import State
from zeroplan.ledger import Line, Moment
from zeroplan.trace import Entry, entry_of

Maker = Callable[[Rank, State, tuple[Line, ...]], Iterable[Moment | Entry]]


def moments_of(rank: Rank, states: tuple[State, ...]) -> Iterator[Entry]:
    """Yield every moment of a step at which the rank's memory can peak, except the optimizer's step."""
    makers = makers_of(splits=any(state.between for state in states))
    for state, waiting in most_waits(rank, states):
        for made in makers[state.kind](rank, state, waiting):
            yield made if isinstance(made, Entry) else entry_of(made)


def makers_of(*, splits: bool) -> dict[str, Maker]:
    """Return the function that makes the moments of each kind of pass; ``splits``: backwards are split in two halves."""
    makers: dict[str, Maker] = {"forward": through, "backward": through, "reducing": reducing}
    if splits:
        from zeroplan.engines.pipeline.split_backward import first_half, second_half  # noqa: PLC0415  keeps start-up fast

        makers |= {"input": first_half, "weights": second_half}
    return makers
