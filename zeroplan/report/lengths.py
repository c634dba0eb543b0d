"""What lengths that vary do to the steps of a run: as text, as Markdown and as plain data."""

from collections.abc import Iterator

from zeroplan.report.words import cells, filled
from zeroplan.step_peaks import Lengths, Peaks
from zeroplan.units import GIBIBYTES, Unit

_NAME = 27
_HEADS = ("median", "90 %", "99 %", "most", "no fit", "cut", "pad", "steps")
_WIDTHS = (7, 6, 6, 7, 7, 6, 6, 8)
_FLASH = "Sequences that are joined or packed also need --attention flash."


def lengths_lines(found: Lengths, unit: Unit) -> Iterator[str]:
    """Yield the lengths in a sentence, and a row for each way of batching."""
    yield from filled(_sentence(found))
    yield _row(f"A step's peak, {unit.name}", _HEADS)
    for one in (found.own, *found.others):
        yield _row(_name(one), _figures(one, unit))
    if found.needs_flash:
        yield _FLASH


def lengths_markdown(found: Lengths) -> Iterator[str]:
    """Yield the same as a table; peaks in GiB."""
    yield _sentence(found) + (f" {_FLASH}" if found.needs_flash else "")
    yield ""
    yield cells("a step's peak, GiB", *_HEADS)
    yield "|---|" + "---:|" * len(_HEADS)
    yield from (cells(_name(one), *_figures(one, GIBIBYTES)) for one in (found.own, *found.others))


def lengths_payload(found: Lengths) -> dict[str, object]:
    """Return the same as plain data. [bytes, tokens, shares]"""
    return {
        "sequences": found.sequences, "mean_tokens": found.mean, "tokens_of_90_in_100": found.of_90_in_100,
        "longest_tokens": found.longest, "drawn": found.drawn, "batchings": [_payload(one) for one in (found.own, *found.others)],
    }  # fmt: skip


def _payload(one: Peaks) -> dict[str, object]:
    return {**one._asdict(), "batching": one.batching._asdict()}


def _row(name: str, figures: tuple[str, ...]) -> str:
    return f"{name:<{_NAME}}" + "".join(f"{figure:>{width}}" for figure, width in zip(figures, _WIDTHS, strict=True))


def _name(one: Peaks) -> str:
    return one.flags or f"{one.batching.way}, as asked"


def _figures(one: Peaks, unit: Unit) -> tuple[str, ...]:
    peaks = (one.median_bytes, one.of_90_in_100_bytes, one.of_99_in_100_bytes, one.highest_bytes)
    out = "rare" if one.runs_out == 0 and not one.fits else _share(one.runs_out)
    sizes = (f"{n_bytes / unit.n_bytes:,.1f}" for n_bytes in peaks)
    return (*sizes, out, _share(one.dropped), _share(one.padding), f"{one.steps:,}")


def _share(share: float | None) -> str:
    """Return a share in percent; one that is not zero never looks like it."""
    if share is None:
        return "-"
    return "<0.1%" if 0 < share < 5e-4 else f"{share:.1%}" if share < 0.0995 else f"{share:.0%}"


def _sentence(found: Lengths) -> str:
    own, ways = found.own, found.own.batching
    each = f"{ways.micro_batch:,} x " if ways.way == "padded" else ""
    said = (
        f"{found.sequences:,} sequences of {found.mean:,.0f} tokens on average, 90 in 100 of up to {found.of_90_in_100:,}, the "
        f"longest of {found.longest:,}. The longest micro-batch has {each}{own.longest:,} tokens."
    )
    if own.runs_out is None:
        return said
    if not own.runs_out:
        return f"{said} No step of {own.steps:,} runs out of memory{'' if own.fits else ', short of orders that are rare'}."
    steps = f"about {own.runs_out * own.steps:,.1f} of {own.steps:,} an epoch"
    return f"{said} Memory runs out in {_share(own.runs_out)} of the steps, {steps}."
