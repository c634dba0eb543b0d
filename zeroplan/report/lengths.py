"""How do varying sequence lengths change the steps' peaks? Renders text and data."""

from zeroplan.report.words import filled
from zeroplan.step_peaks import Lengths, Peaks
from zeroplan.units import Unit

_NAME = 27
_HEADS = ("median", "90 %", "99 %", "most", "no fit", "cut", "pad", "steps")
_WIDTHS = (7, 6, 6, 7, 7, 6, 6, 8)
_FLASH = "Sequences that are joined or packed also need --attention flash."


def lengths_lines(found: Lengths, unit: Unit) -> tuple[str, ...]:
    """Return a sentence on the lengths, and a row for each way of batching."""
    rows = [
        (f"A step's peak, {unit.name}", _HEADS),
        *((one.flags or f"{one.batching.way}: your flags", _figures(one, unit)) for one in (found.own, *found.others)),
    ]
    table = [f"{name:<{_NAME}}" + "".join(map(str.rjust, figures, _WIDTHS)) for name, figures in rows]
    return (*filled(_sentence(found)), *table, *([_FLASH] if found.needs_flash else []))


def lengths_payload(found: Lengths) -> dict[str, object]:
    """Return the lengths and each way of batching as plain data. [bytes, tokens, shares]"""
    tokens = found.varying.tokens
    return {
        "sequences": len(tokens), "mean_tokens": sum(tokens) / len(tokens), "tokens_of_90_in_100": found.varying.within(0.9),
        "longest_tokens": max(tokens), "drawn": found.varying.drawn,
        "batchings": [{**one._asdict(), "batching": one.batching._asdict()} for one in (found.own, *found.others)],
    }  # fmt: skip


def _figures(one: Peaks, unit: Unit) -> tuple[str, ...]:
    peaks = (one.median_bytes, one.of_90_in_100_bytes, one.of_99_in_100_bytes, one.highest_bytes)
    sizes = (f"{n_bytes / unit.n_bytes:,.1f}" for n_bytes in peaks)
    out = "rare" if one.runs_out == 0 and not one.fits else _share(one.runs_out)
    return (*sizes, out, _share(one.dropped), _share(one.padding), f"{one.steps:,}")


def _share(share: float | None) -> str:
    """Return a share in percent; a nonzero share never prints as zero."""
    if share is None:
        return "-"
    return "<0.1%" if 0 < share < 5e-4 else f"{share:.1%}" if share < 0.0995 else f"{share:.0%}"


def _sentence(found: Lengths) -> str:
    own, tokens, each = found.own, found.varying.tokens, ""
    if own.batching.way == "padded":
        each = f"{own.batching.micro_batch:,} x "
    sentence = (
        f"{len(tokens):,} sequences: {sum(tokens) / len(tokens):,.0f} tokens on average, 90 in 100 at most "
        f"{found.varying.within(0.9):,}, the longest {max(tokens):,}. The longest micro-batch has {each}{own.longest:,} tokens."
    )
    if own.runs_out is None:
        return sentence
    if not own.runs_out:
        unless = "" if own.fits else ", except in rare orders of the sequences"
        return f"{sentence} No step of {own.steps:,} runs out of memory{unless}."
    out = f"about {own.runs_out * own.steps:,.1f} of {own.steps:,} in an epoch"
    return f"{sentence} Memory runs out in {_share(own.runs_out)} of the steps, {out}."
