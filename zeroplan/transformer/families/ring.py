"""Attention over a sequence that context-parallel ranks share, as torch's ``context_parallel`` runs it: what rank 0 holds.

Each rank has an early and a late part of the sequence, so that all have as much to do. Keys and values of all ranks are gathered
once; the rank goes from one rank's to the next and merges what it makes, in fp32. Rank 0 has the very first part, so that only
its late half of queries sees others' keys. Backward, the gradients of keys and values go round instead.

Source: torch 2.13, ``torch/distributed/tensor/experimental/_context_parallel/_attention.py``.
"""

from zeroplan.transformer.families.attend import Attended, Heads, flash_scratch, in_order_of_tokens
from zeroplan.transformer.families.attention import FLASH_BACKWARD, FLASH_SCRATCH
from zeroplan.transformer.families.operators import GRADIENT, TEMPORARY, TENSOR, gradient, tensor
from zeroplan.transformer.families.tape import Arriving, Store, Tape

FORWARD = "torch 2.13, torch/distributed/tensor/experimental/_context_parallel/_attention.py, _templated_ring_attention"
BACKWARD = (
    "torch 2.13, torch/distributed/tensor/experimental/_context_parallel/_attention.py, _templated_ring_attention_backward"
)
MERGE = "torch 2.13, torch/distributed/tensor/experimental/_context_parallel/_attention.py, _SDPAMerger"
_PAIR = "e·T·(k+v)"


def ring_attention(tape: Tape, heads: Heads, ranks: int) -> Attended:
    """Run the flash kernel once for each of ``ranks``; saved are the operands, the merged output and log-sum-exp.

    Halves of tensors put the merged output head by head, so that it is copied into the order of tokens, and both are saved, unless
    there is a single head.
    """
    sums = _forward(tape, heads, ranks)
    made = tensor(tape, "attention output, merged", "e", "T·c", MERGE)
    tape.drop(*tape.scratch)
    tape.scratch.clear()

    def backward(tape: Tape, _taken: list[Store]) -> Arriving:
        return _backward(tape, heads, ranks)

    operands = heads.query, heads.key, heads.value
    tape.add("attention", (made,), (*(one.store for one in operands), made.store, sums), backward)
    tape.by_kernel(made.store, sums)
    tape.drop(sums)
    one_head = heads.one_key and not heads.grouped
    return Attended(made if one_head else in_order_of_tokens(tape, made, "attention output in the order of tokens"))


def _copies(tape: Tape, heads: Heads, source: str) -> tuple[Store, ...]:
    """Keys and values head by head, which copies both unless there is a single head."""
    if heads.one_key:
        return ()
    return (
        tape.make(TEMPORARY, "keys, head by head", "e·T·k", source),
        tape.make(TEMPORARY, "values, head by head", "e·T·v", source),
    )


def _forward(tape: Tape, heads: Heads, ranks: int) -> Store:
    """What ends with the operator is left in ``tape.scratch``; returned is the merged log-sum-exp."""

    def make(reason: str, formula: str) -> Store:
        return tape.make(TEMPORARY, reason, formula, MERGE)

    copies, pair = _copies(tape, heads, FORWARD), tape.make(TEMPORARY, "keys and values, to be sent", _PAIR, FORWARD)
    whole = tape.make(TEMPORARY, "keys and values of all ranks", f"{ranks}·{_PAIR}", FORWARD)
    tape.drop(pair)
    part, sums = (
        make("output for this rank's keys", "e·T·q"),
        tape.make(TENSOR, "log-sum-exp of the scores, fp32", "4·T·a", MERGE),
    )
    parts: tuple[Store, ...] = (part,)
    merged = make("output so far, fp32", "4·T·q")
    for other in range(1, ranks):
        if other < ranks - 1:
            tape.drop(tape.make(TEMPORARY, "keys and values, in vain", _PAIR, FORWARD))
        if other == 1:
            tape.drop(*copies)
        new = make("output of half the queries for another rank's keys", "e·T/2·q"), make("its log-sum-exp", "4·T/2·a")
        tape.drop(*parts)
        parts = new
        wide = make("the same, fp32", "4·T/2·q")
        sums, merged = _merged(tape, sums, merged)
        tape.drop(wide)
    tape.scratch += [merged, whole, *parts]
    return sums


def _merged(tape: Tape, sums: Store, merged: Store) -> tuple[Store, Store]:
    """Put half of an output into the one so far: the half is weighted in four tensors, then the whole is written anew."""

    def make(reason: str, formula: str) -> Store:
        return tape.make(TEMPORARY, reason, formula, MERGE)

    less = make("difference of log-sum-exps", "4·T/2·a")
    weight = make("weight of the new half", "4·T/2·a")
    tape.drop(less)
    apart = make("difference of outputs, fp32", "4·T/2·q")
    weighted = make("the same, weighted", "4·T/2·q")
    tape.drop(weight, apart)
    half = make("merged half of the output, fp32", "4·T/2·q")
    tape.drop(weighted)
    half_sums = make("merged half of the log-sum-exp", "4·T/2·a")
    new_sums = tape.make(TENSOR, "log-sum-exp of the scores, fp32", "4·T·a", MERGE)
    tape.drop(sums)
    new = make("output so far, fp32", "4·T·q")
    tape.drop(merged, half_sums, half)
    return new_sums, new


def _backward(tape: Tape, heads: Heads, ranks: int) -> Arriving:
    def make(reason: str, formula: str) -> Store:
        return tape.make(GRADIENT, reason, formula, BACKWARD)

    def kernel(queries: str) -> tuple[Store, ...]:
        made = (
            make("gradient of the queries from one rank's keys", f"e·{queries}·q"),
            make("of its keys", "e·T·k"),
            make("of its values", "e·T·v"),
        )
        tape.drop(tape.make(TEMPORARY, FLASH_SCRATCH, flash_scratch(grouped=heads.grouped), FLASH_BACKWARD))
        return made

    queries = make("gradient of the queries, fp32", "4·T·q")
    own: tuple[Store, ...] = make("gradient of the keys, fp32", "4·T·k"), make("gradient of the values, fp32", "4·T·v")
    copies, pair = _copies(tape, heads, BACKWARD), tape.make(TEMPORARY, "keys and values, to be sent", _PAIR, BACKWARD)
    whole = tape.make(TEMPORARY, "keys and values of all ranks", f"{ranks}·{_PAIR}", BACKWARD)
    parts = kernel("T")
    flat = () if heads.one_key else (make("gradient of the keys, flat", "4·T·k"), make("gradient of the values, flat", "4·T·v"))
    sent = make("gradients of keys and values, to be sent, fp32", "4·T·(k+v)")
    tape.drop(*flat)
    come = make("gradients of keys and values that come, fp32", "4·T·(k+v)")
    half_sums: tuple[Store, ...] = ()
    for other in range(1, ranks):
        if other < ranks - 1:
            another = tape.make(TEMPORARY, "keys and values, in vain", _PAIR, BACKWARD)
            tape.drop(pair)
            pair = another
        half = (tape.make(TEMPORARY, "half of the log-sum-exp", "4·T/2·a", BACKWARD),)
        tape.drop(*half_sums, *(copies if other == 1 else ()))
        half_sums = half
        new = kernel("T/2")
        tape.drop(*parts, sent, *own)
        parts, own = new, (come,)
        sent = make("gradients of keys and values, to be sent, fp32", "4·T·(k+v)")
        come = make("gradients of keys and values that come, fp32", "4·T·(k+v)")
        another = make("gradient of the queries, fp32", "4·T·q")
        tape.drop(queries)
        queries = another
    of_queries = gradient(tape, heads.query, "gradient of the queries", BACKWARD)
    tape.drop(queries)
    both = make("gradients of keys and values", _PAIR)
    tape.hold(both)
    tape.drop(sent, *own, pair, *parts, come, whole, *half_sums)
    return [(heads.query, of_queries), (heads.key, both), (heads.value, both)]
