"""Ring attention: context-parallel ranks split the sequence, as torch's ``context_parallel`` does. The tape is rank 0's.

Each rank has an early and a late part of the sequence, which balances their work. One all-gather collects the keys and values
of all ranks. The rank runs the kernel for each rank's keys in sequence, and merges the outputs in fp32. Rank 0 has the first
part, so only its late half of queries attends to other ranks' keys. In the backward the ranks pass gradients of keys and values
around the ring.

Source: torch 2.13, ``torch/distributed/tensor/experimental/_context_parallel/_attention.py``.
"""

from collections.abc import Iterable

from zeroplan.expr import Size
from zeroplan.ledger import Among
from zeroplan.transformer.families.attention import Attended, Heads, HeadSize, flash_scratch, in_order_of_tokens
from zeroplan.transformer.families.operators import GRADIENT, TEMPORARY, TENSOR, gradient, tensor
from zeroplan.transformer.families.tags import FLASH_BACKWARD, FLASH_SCRATCH, SCRATCH
from zeroplan.transformer.families.tape import Arriving, Exchange, Store, Tape
from zeroplan.transformer.symbols import T_2, T, a, c, e, k, q, v

FORWARD = "torch 2.13, torch/distributed/tensor/experimental/_context_parallel/_attention.py, _templated_ring_attention"
BACKWARD = (
    "torch 2.13, torch/distributed/tensor/experimental/_context_parallel/_attention.py, _templated_ring_attention_backward"
)
MERGE = "torch 2.13, torch/distributed/tensor/experimental/_context_parallel/_attention.py, _SDPAMerger"
#: The first steps of a ring, each of which may begin with other tensors alive than the one before.
_DIFFERING = 3
_PAIR = e * T * (k + v)
_PASSED_ON = Exchange("all_to_all", Among.SEQUENCE, 4 * T * (k + v))


def ring_attention(tape: Tape, heads: Heads, *, ranks: int, size: HeadSize) -> Attended:
    """Run the flash kernel once per rank. Autograd saves its operands, the merged output and the merged log-sum-exp.

    With several heads the merged output is laid out head by head. A copy in token order follows, and the output projection
    saves that copy.
    """
    sums = _forward(tape, heads, ranks)
    made = tensor(tape, "attention output, merged", e, T * c, MERGE)
    tape.drop(*tape.scratch)
    tape.scratch.clear()

    def backward(tape: Tape, _grad_outputs: list[Store]) -> Arriving:
        ring = _RingBackward(tape, heads, ranks, size)
        for other in _others(tape, ranks):
            ring.step(other)
        return ring.end()

    operands = heads.query, heads.key, heads.value
    tape.add("attention", (made,), (*(one.store for one in operands), made.store, sums), backward, of=operands)
    tape.kernel_output(made.store, sums)
    tape.drop(sums)
    one_head = heads.one_key and not heads.grouped
    return Attended(made if one_head else in_order_of_tokens(tape, made, "attention output in the order of tokens"))


def _others(tape: Tape, ranks: int) -> Iterable[int]:
    """Return the other ranks in sequence; of a brief tape those whose steps differ: from the fourth on, all but the last repeat."""
    return [*range(1, min(ranks - 1, _DIFFERING + 1)), ranks - 1] if tape.brief else range(1, ranks)


def _gathers(ranks: int) -> Exchange:
    return Exchange("all_gather", Among.SEQUENCE, ranks * _PAIR)


def _copies(tape: Tape, heads: Heads, source: str) -> tuple[Store, ...]:
    """Copy keys and values head by head, unless there is a single head."""
    if heads.one_key:
        return ()
    return (
        tape.make(TEMPORARY, "keys, head by head", e * T * k, source),
        tape.make(TEMPORARY, "values, head by head", e * T * v, source),
    )


def _forward(tape: Tape, heads: Heads, ranks: int) -> Store:
    """Return the merged log-sum-exp. ``tape.scratch`` holds the tensors that live until the operator ends."""

    def make(reason: str, formula: Size) -> Store:
        return tape.make(TEMPORARY, reason, formula, MERGE)

    copies, pair = _copies(tape, heads, FORWARD), tape.make(TEMPORARY, "keys and values, to be sent", _PAIR, FORWARD)
    whole = tape.make(TEMPORARY, "keys and values of all ranks", ranks * _PAIR, FORWARD)
    tape.send(_gathers(ranks)._replace(kept=True))
    tape.drop(pair)
    part, sums = (
        make("output for this rank's keys", e * T * q),
        tape.make(TENSOR, "log-sum-exp of the scores, fp32", 4 * T * a, MERGE),
    )
    parts: tuple[Store, ...] = (part,)
    merged = make("output so far, fp32", 4 * T * q)
    for other in _others(tape, ranks):
        if other < ranks - 1:
            tape.drop(tape.make(TEMPORARY, "keys and values that nothing reads", _PAIR, FORWARD))
        if other == 1:
            tape.drop(*copies)
        new = make("output of half the queries for another rank's keys", e * T_2 * q), make("its log-sum-exp", 4 * T_2 * a)
        tape.drop(*parts)
        parts = new
        wide = make("the same, fp32", 4 * T_2 * q)
        sums, merged = _merged(tape, sums, merged)
        tape.drop(wide)
    tape.scratch += [merged, whole, *parts]
    return sums


def _merged(tape: Tape, sums: Store, merged: Store) -> tuple[Store, Store]:
    """Merge half of an output into the total: four tensors compute the half's weight, then a new tensor holds the result."""

    def make(reason: str, formula: Size) -> Store:
        return tape.make(TEMPORARY, reason, formula, MERGE)

    less = make("difference of log-sum-exps", 4 * T_2 * a)
    weight = make("weight of the new half", 4 * T_2 * a)
    tape.drop(less)
    apart = make("difference of outputs, fp32", 4 * T_2 * q)
    weighted = make("the same, weighted", 4 * T_2 * q)
    tape.drop(weight, apart)
    half = make("merged half of the output, fp32", 4 * T_2 * q)
    tape.drop(weighted)
    half_sums = make("merged half of the log-sum-exp", 4 * T_2 * a)
    new_sums = tape.make(TENSOR, "log-sum-exp of the scores, fp32", 4 * T * a, MERGE)
    tape.drop(sums)
    new = make("output so far, fp32", 4 * T * q)
    tape.drop(merged, half_sums, half)
    return new_sums, new


class _RingBackward:
    """The rank's tensors in the backward, from the kernel for its own keys to the kernel for the last rank's."""

    def __init__(self, tape: Tape, heads: Heads, ranks: int, size: HeadSize) -> None:
        """Run the kernel for the rank's own keys."""
        self.tape, self.heads, self.ranks, self.size = tape, heads, ranks, size
        self.queries = self._made("gradient of the queries, fp32", 4 * T * q)
        self.own: tuple[Store, ...] = (
            self._made("gradient of the keys, fp32", 4 * T * k), self._made("gradient of the values, fp32", 4 * T * v)
        )  # fmt: skip
        self.copies, self.pair = _copies(tape, heads, BACKWARD), self._held("keys and values, to be sent", _PAIR)
        self.whole = self._held("keys and values of all ranks", ranks * _PAIR)
        tape.send(_gathers(ranks))
        self.parts = self._kernel(T)
        flat = () if heads.one_key else (
            self._made("gradient of the keys, flat", 4 * T * k), self._made("gradient of the values, flat", 4 * T * v)
        )  # fmt: skip
        self.sending = self._send()
        tape.drop(*flat)
        self.received = self._receive()
        self.half_sums: tuple[Store, ...] = ()

    def step(self, other: int) -> None:
        """Run the kernel for another rank's keys, with half of the queries."""
        tape = self.tape
        if other < self.ranks - 1:
            another = self._held("keys and values that nothing reads", _PAIR)
            tape.drop(self.pair)
            self.pair = another
        half = (self._held("half of the log-sum-exp", 4 * T_2 * a),)
        tape.drop(*self.half_sums, *(self.copies if other == 1 else ()))
        self.half_sums = half
        new = self._kernel(T_2)
        tape.drop(*self.parts, self.sending, *self.own)
        self.parts, self.own = new, (self.received,)
        self.sending, self.received = self._send(), self._receive()
        another = self._made("gradient of the queries, fp32", 4 * T * q)
        tape.drop(self.queries)
        self.queries = another

    def end(self) -> Arriving:
        """Return the gradients of queries, keys and values, each in the dtype of its tensor."""
        tape, heads = self.tape, self.heads
        of_queries = gradient(tape, heads.query, "gradient of the queries", BACKWARD)
        tape.drop(self.queries)
        both = self._made("gradients of keys and values", _PAIR)
        tape.hold(both)
        tape.drop(self.sending, *self.own, self.pair, *self.parts, self.received, self.whole, *self.half_sums)
        return [(heads.query, of_queries), (heads.key, both), (heads.value, both)]

    def _made(self, reason: str, formula: Size) -> Store:
        return self.tape.make(GRADIENT, reason, formula, BACKWARD)

    def _held(self, reason: str, formula: Size) -> Store:
        return self.tape.make(TEMPORARY, reason, formula, BACKWARD)

    def _send(self) -> Store:
        return self._made("gradients of keys and values, to be sent, fp32", 4 * T * (k + v))

    def _receive(self) -> Store:
        received = self._made("gradients of keys and values received, fp32", 4 * T * (k + v))
        self.tape.send(_PASSED_ON)
        return received

    def _kernel(self, queries: Size) -> tuple[Store, ...]:
        made = (
            self._made("gradient of the queries from one rank's keys", e * queries * q),
            self._made("of its keys", e * T * k),
            self._made("of its values", e * T * v),
        )
        scratch = flash_scratch(self.size, grouped=self.heads.grouped)
        self.tape.drop(self.tape.make(TEMPORARY, FLASH_SCRATCH, scratch, FLASH_BACKWARD, SCRATCH))
        return made
