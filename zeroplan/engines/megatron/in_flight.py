"""Which layers wait for their backward, and what do they keep?"""

from collections.abc import Iterator
from typing import NamedTuple

from zeroplan.engines.megatron.chunks import LETTERS, Counts, fullest, layers_of_a_checkpoint, runs_of
from zeroplan.engines.megatron.rank import Rank
from zeroplan.ledger import Kind, Line, total_bytes
from zeroplan.numeric import Int, ceil_div, maximum, minimum
from zeroplan.spec.described import Job
from zeroplan.spec.recipe import RecipeSpec
from zeroplan.transformer.families.megatron.attention import CROSS, ENCODED
from zeroplan.transformer.megatron import Layers, element_of

T5 = "Megatron-LM 2026-08, megatron/core/models/T5/t5_model.py, T5Model.forward"
SCHEDULE = "Megatron-LM 2026-08, megatron/core/pipeline_parallel/schedules.py, get_pp_rank_microbatches"


class InFlight(NamedTuple):
    """The layers of a rank that wait for their backward."""

    counts: tuple[Int, ...]
    """Number of layers of each kind. A checkpoint of several layers counts as one."""
    formulas: tuple[str, ...]
    words: tuple[str, ...]
    each: tuple[Counts, ...]
    """Number of layers of each kind in every chunk, counted in the same way."""
    letters: tuple[str, ...] = ()
    """With a hybrid pattern: the letters of each chunk."""
    kinds: str = ""
    """With a hybrid pattern: the letter of each kind."""

    def over(self, kind: int, other: int) -> int:
        """Layers of kind ``other`` that no longer wait when a chunk's backward runs its last layer of ``kind``.

        The running layer counts as one of them. Chunks may differ; the smallest number is returned.
        """
        if self.letters:
            mine, others = self.kinds[kind], self.kinds[other]
            return min(chunk[chunk.rindex(mine) :].count(others) for chunk in self.letters if mine in chunk)
        if other <= kind:
            return int(other == kind)
        return min(counts[other] for counts in self.each if counts[kind])


def without(in_flight: InFlight, over: tuple[Int, ...]) -> InFlight:
    """Return the layers that wait for their backward, without ``over`` layers of each kind."""
    counts = tuple(maximum(0, count - each) for count, each in zip(in_flight.counts, over, strict=True))
    formulas = tuple(f"({formula} - {each})" for formula, each in zip(in_flight.formulas, over, strict=True))
    return in_flight._replace(counts=counts, formulas=formulas)


def in_flight_of(rank: Rank, layers: Layers, job: Job, *, loss: bool = False) -> InFlight:
    """Return the layers in flight when they need most memory; with ``loss``, when the loss is computed."""
    kinds, together = [run.kind for run in runs_of(job)], layers_of_a_checkpoint(job.recipe)
    each = tuple(tuple(ceil_div(count, together) for count in counts) for counts in rank.each)
    letters = _letters_of(rank, job.recipe, kinds)
    if len(set(each)) == 1:
        counts: tuple[Int, ...] = tuple(rank.chunks * count for count in each[0])
        words = tuple(f"{count} {kind} layers of a chunk" for count, kind in zip(each[0], kinds, strict=True))
        return InFlight(counts, tuple(f"K·{count}" for count in each[0]), words, each, *letters)
    weights = tuple(total_bytes((*layers.kinds[kind].kept, *layers.kinds[kind].statistics)) for kind in kinds)
    found = fullest(rank.schedule, each, job.batch.grad_accum_steps, weights, loss=loss)
    letter = "G" if loss else "F"
    words = tuple(f"{kind} layers" for kind in kinds)
    return InFlight(found, tuple(f"{letter}_{kind}" for kind in kinds), words, each, *letters)


def _letters_of(rank: Rank, recipe: RecipeSpec, kinds: list[str]) -> tuple[tuple[str, ...], str]:
    """Return a hybrid pattern's letters for each chunk of a rank, and the letter of each kind; empty without a pattern."""
    pattern = recipe.megatron.hybrid_layer_pattern
    if pattern is None:
        return (), ""
    return tuple(pattern[one.start : one.stop] for one in rank.stages), "".join(LETTERS[kind] for kind in kinds)


def in_layers(in_flight: InFlight, layers: Layers, job: Job, *, last: str | None = None) -> Iterator[Line]:
    """Yield the activations that layers in flight keep. [bytes]

    With ``last``, the backward runs a layer of that kind. Neither this layer nor the later ones of its chunk are counted.
    """
    kinds = [run.kind for run in runs_of(job)]
    at = None if last is None else kinds.index(last)
    for number, kind in enumerate(kinds):
        count, formula = in_flight.counts[number], in_flight.formulas[number]
        over = 0 if at is None else in_flight.over(at, number)
        if isinstance(count, int) and count <= over:
            continue
        if kind == "decoder":
            read = minimum(1, maximum(0, count - over))  # 0 at places of a column without such layers
            yield from (line._replace(n_bytes=read * line.n_bytes) for line in _encoded(layers, job))
        several = f"({formula} - {over})" if over else formula
        for letter, lines, what in (
            ("S", layers.kinds[kind].kept, "keep"),
            ("Z", layers.kinds[kind].statistics, "keep of statistics"),
        ):
            if lines:
                reason = f"what {in_flight.words[number]} {what}, of every chunk in flight"
                n_bytes = maximum(0, count - over) * total_bytes(lines)
                yield Line(Kind.ACTIVATIONS, n_bytes, reason, f"{several}·{letter}_{kind}", SCHEDULE)


def _encoded(layers: Layers, job: Job) -> Iterator[Line]:
    """Yield the output of T5's encoder, which every decoder layer reads, and what its final norm keeps. [bytes]"""
    tokens, e = layers.value("T_e"), element_of(job.recipe)
    yield Line(Kind.ACTIVATIONS, e * tokens * job.model.hidden_size, ENCODED, "e·T_e·h", CROSS)
    norm = (e * job.model.hidden_size + 8) * tokens
    yield Line(Kind.ACTIVATIONS, norm, "input and statistics of the encoder's final norm", "(e·h + 8)·T_e", T5)
