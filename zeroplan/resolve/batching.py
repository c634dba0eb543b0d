"""Batches sequences of different lengths into micro-batches: padded, joined, packed, or under a token budget.

Packing follows TRL 1.16 and token budgets follow verl 0.9.1; tests/test_batching.py compares both with their own code.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush
from typing import Final, Literal, NamedTuple, TypeAlias

import numpy as np

from zeroplan.errors import SpecError
from zeroplan.numeric import round_up
from zeroplan.resolve.lengths import CAREFUL, Lognormal, drawn_once, lengths_of, longest_of, note_of
from zeroplan.spec.batch import BatchSpec
from zeroplan.spec.mesh import MeshSpec

Column: TypeAlias = np.ndarray[tuple[int, ...], np.dtype[np.int64]]
Way = Literal["padded", "padding-free", "packed", "budget"]
#: The flag of each way.
WAYS: Final[dict[str, Way]] = {
    "": "padded", "--padding-free": "padding-free", "--packing": "packed", "--token-budget": "budget",
}  # fmt: skip
#: ``datasets.Dataset.map`` passes 1,000 sequences at a time to TRL. From larger data sets only 20,000 sequences are packed.
PACKED_AT_ONCE, MOST_PLACED = 1000, 20_000
#: verl's work of a sequence is 24576 · tokens + tokens².
_PER_TOKEN: Final = 24576


class Batching(NamedTuple):
    """How sequences become the micro-batches of a step."""

    way: Way
    micro_batch: int  # sequences, or packs, of a micro-batch; under a budget, a rank's sequences per step / accumulated
    cut: int  # longer sequences are cut to this many tokens
    ranks: int  # data-parallel ranks
    accumulated: int  # micro-batches of a rank in a step
    budget: int = 0  # with a budget, the most tokens of a micro-batch
    multiple: int = 1  # ranks that share a sequence pad it to a multiple of this

    @property
    def of_a_rank(self) -> int:
        """Sequences of one rank in a step."""
        return self.micro_batch * self.accumulated

    @property
    def per_step(self) -> int:
        """Sequences of all ranks in a step."""
        return self.of_a_rank * self.ranks


class Varying(NamedTuple):
    """Sequences of different lengths, and how they are batched."""

    tokens: tuple[int, ...]
    batching: Batching
    drawn: bool  # from a distribution, not from data

    @property
    def lengths(self) -> Column:
        """The tokens of every sequence as a column."""
        return np.array(self.tokens, dtype=np.int64)

    def within(self, share: float) -> int:
        """The length that this share of the sequences does not exceed. [tokens]"""
        return sorted(self.tokens)[int(np.ceil(share * len(self.tokens))) - 1]


def packed(lengths: Sequence[int], size: int) -> list[int]:
    """Return the length of each pack, by best fit, the longest sequence first, in groups of 1,000 sequences. [tokens]

    Source: TRL 1.16, data_utils.py, ``_pack_bfd`` with ``on_seq_length_overflow="truncate"``.
    """
    parts = (lengths[at : at + PACKED_AT_ONCE] for at in range(0, len(lengths), PACKED_AT_ONCE))
    return [pack for part in parts for pack in _packs(sorted((min(one, size) for one in part), reverse=True), size)]


def _packs(longest_first: Sequence[int], size: int) -> Iterator[int]:
    """Yield the length of each pack. A sequence goes into the fullest pack that has room, or into a new one. [tokens]"""
    rooms: list[int] = []
    for length in longest_first:
        at = bisect_left(rooms, length)
        insort(rooms, (rooms.pop(at) if at < len(rooms) else size) - length)
    return (size - room for room in rooms)


def budgeted(each_rank: Sequence[Sequence[int]], budget: int) -> list[int]:
    """Return the lengths of all micro-batches of a step, none above the budget. [tokens]

    All ranks have the same number of micro-batches. Source: verl 0.9.1, utils/seqlen_balancing.py, ``rearrange_micro_batches``.
    """
    count = max(min(len(lengths), -(-sum(lengths) // budget)) for lengths in each_rank)
    while True:
        made = [
            sum(map(lengths.__getitem__, part)) for lengths in each_rank for part in balanced(lengths, min(count, len(lengths)))
        ]
        if max(made) <= budget:
            return made
        count += 1


class _Parts:
    """A partition of some sequences: each part has its work and its sequences; the part with the most work comes first."""

    def __init__(self, parts: list[tuple[int, int, list[tuple[int, int]]]]) -> None:
        self.parts = sorted(parts, reverse=True)
        self.spread = self.parts[0][0] - self.parts[-1][0]

    def __lt__(self, other: "_Parts") -> bool:
        return self.spread > other.spread if self.spread != other.spread else self.parts[0] > other.parts[0]

    def with_(self, other: "_Parts") -> "_Parts":
        pairs = zip(self.parts, reversed(other.parts), strict=True)
        return _Parts([(mine + theirs, n + m, [*some, *others]) for (mine, n, some), (theirs, m, others) in pairs])


def balanced(lengths: Sequence[int], count: int) -> list[list[int]]:
    """Partition the sequences into ``count`` parts of about equal work (Karmarkar-Karp); return the indices of each part.

    Source: verl 0.9.1, utils/seqlen_balancing.py, ``karmarkar_karp`` of ``calculate_workload``.
    """
    work = sorted((_PER_TOKEN * length + length**2, at) for at, length in enumerate(lengths))
    heap = [_Parts([(each, 1, [(at, each)]), *[(0, 0, [])] * (count - 1)]) for each, at in work]
    heapify(heap)
    while len(heap) > 1:
        heappush(heap, heappop(heap).with_(heappop(heap)))
    return [[at for at, _ in part] for _, _, part in heap[0].parts]


def largest(varying: Varying) -> tuple[int, int]:
    """Return the tokens of the largest possible micro-batch under the budget, and the most micro-batches of a rank's step."""
    batching = varying.batching
    total = int(np.sort(np.minimum(varying.lengths, batching.cut))[-batching.of_a_rank :].sum())
    return min(batching.budget, total), -(-total // batching.budget)


def of_varying(text: str, flag: str, given: BatchSpec, mesh: MeshSpec, budget: int) -> tuple[BatchSpec, str, Varying]:
    """Return the longest micro-batch of a run, a note on it, and the lengths of ``--lengths`` with their batching.

    ``given`` has the size of a micro-batch, the length at which sequences are cut, and the micro-batches of a step.
    """
    lengths, cut, size, steps = lengths_of(text), given.seq_len, given.micro_batch_size, given.grad_accum_steps
    multiple = 2 * mesh.cp * mesh.tp if mesh.cp > 1 else mesh.tp
    batching = Batching(WAYS[flag], size, cut, mesh.dp_replicate * mesh.dp_shard, steps, budget, multiple)
    drawn, joined = isinstance(lengths, Lognormal), batching.way != "padded"
    varying = Varying(tuple(drawn_once(lengths).tolist()), batching, drawn)
    if batching.way == "budget":
        return _under(varying)
    if batching.way == "packed":
        if mesh.cp > 1:  # TRL 1.16, trainer/sft_trainer.py, SFTTrainer.__init__
            raise SpecError(
                "--packing with --context-parallel: TRL refuses it: packs would attend to each other; leave one out"
            )
        lengths = np.array(packed(varying.tokens[:MOST_PLACED], cut), dtype=np.int64)
    longest = longest_of(lengths, cut=cut, micro_batch=size, padding_free=joined)
    taken = longest.within(CAREFUL)
    most = round_up(min(size * cut, taken + cut) if joined else cut, multiple) if drawn else None
    tokens = round_up(taken, multiple)
    batch = BatchSpec(micro_batch_size=longest.sequences, seq_len=tokens, grad_accum_steps=steps, longest_seq_len=most)
    return batch, note_of(longest, taken, drawn=drawn), varying


def _under(varying: Varying) -> tuple[BatchSpec, str, Varying]:
    """Return the largest micro-batch under a budget; raises SpecError if the longest sequence is beyond it."""
    batching, longest = varying.batching, min(max(varying.tokens), varying.batching.cut)
    if longest > batching.budget:
        raise SpecError(
            f"--token-budget {batching.budget:,}: the longest sequence has {longest:,} tokens, which verl refuses; raise it, or "
            "cut sequences with --seq-len"
        )
    tokens, count = largest(varying)
    note = f"a micro-batch has at most {tokens:,} tokens: the budget, or a rank's {batching.of_a_rank:,} longest sequences"
    most = batching.budget if varying.drawn else None
    batch = BatchSpec(seq_len=round_up(tokens, batching.multiple), grad_accum_steps=count, longest_seq_len=most)
    return batch, note, varying
