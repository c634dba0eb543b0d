"""Renders predicted beside measured figures, the largest difference first, as text, Markdown and JSON data."""

from collections.abc import Iterator
from dataclasses import asdict

from zeroplan.comparison import Compared, Comparison, Reserved
from zeroplan.measurement import Measurement
from zeroplan.report.words import item, model_words, paragraphs, plural
from zeroplan.units import GB, GIB, KB, KIB, MB, MIB, format_gib, format_size

_WHAT = 34
_ALLOCATOR = "CUDA's allocator, not judged"  # reserved memory also depends on the order of requests


def comparison_text(comparison: Comparison, measurement: Measurement, *, tolerance: float) -> str:
    """Return one table each for peak and phases, kinds, collectives and the allocator, then the verdict and the remarks."""
    parts = [
        [headline(measurement), how_line(measurement), *_own_workload(measurement)],
        list(compared_table("Memory", _memory(comparison))),
        list(compared_table("Alive at the peak (each at its own)", comparison.kinds)),
        list(compared_table("Sent and received per step", comparison.collectives)),
        list(compared_table(_ALLOCATOR, _of_the_allocator(comparison))),
        [verdict(comparison, tolerance=tolerance), *reserved_lines(comparison)],
        list(_remarks(measurement)),
    ]
    return paragraphs(parts)


def comparison_markdown(comparison: Comparison, measurement: Measurement, *, tolerance: float) -> str:
    """Return the comparison as Markdown tables."""
    parts = [
        [f"## {headline(measurement)}", "", how_line(measurement), *(f"\n{line}" for line in _own_workload(measurement))],
        list(_markdown_table("memory", _memory(comparison))),
        list(_markdown_table("alive at the peak (each at its own)", comparison.kinds)),
        list(_markdown_table("sent and received per step", comparison.collectives)),
        list(_markdown_table(_ALLOCATOR.lower(), _of_the_allocator(comparison))),
        [verdict(comparison, tolerance=tolerance), *(f"\n{line}" for line in reserved_lines(comparison))],
        [f"- {remark}" for remark in measurement.remarks],
    ]
    return paragraphs(parts)


def comparison_payload(comparison: Comparison, measurement: Measurement, *, tolerance: float) -> dict[str, object]:
    """Return the comparison as data for ``json.dumps``. An error without a measurement is null."""
    return {
        "agrees": comparison.agrees(tolerance),
        "tolerance": tolerance,
        "peak": row_payload(comparison.peak),
        "first_micro_batch": None if comparison.first is None else row_payload(comparison.first),
        "held": row_payload(comparison.held),
        "host": None if comparison.host is None else row_payload(comparison.host),
        "nvme": None if comparison.nvme is None else row_payload(comparison.nvme),
        "phases": [row_payload(row) for row in comparison.phases],
        "kinds": [row_payload(row) for row in comparison.kinds],
        "collectives": [row_payload(row) for row in comparison.collectives],
        "allocator": [row_payload(row) for row in _of_the_allocator(comparison)],
        "reserved": [_reserved_payload(one) for one in comparison.reserved],
        "contradicted": comparison.contradicted,
        "measurement": asdict(measurement),
    }


def rank_line(comparison: Comparison, measurement: Measurement) -> str:
    """Return one rank in a line: its peak, and the memory it holds between steps."""
    peak, held = comparison.peak.measured, comparison.held.measured
    return f"- rank {measurement.rank}: peak {format_size(peak)}, held between steps {format_size(held)}"


def headline(measurement: Measurement) -> str:
    """Return the measured job in words."""
    job = measurement.job
    what = f"workload {measurement.workload}" if measurement.workload else model_words(measurement.job)
    return f"{what}, {job.recipe.engine} ZeRO stage {job.recipe.zero_stage}, rank {measurement.rank} of {job.mesh.world_size:,}"


def _own_workload(measurement: Measurement) -> list[str]:
    """Return a warning that two different jobs may be compared."""
    measured = "measured: the workload, with its own module and batch"
    predicted = f"predicted: the job, {model_words(measurement.job)} with the job's batch and sequence length"
    return [f"{measured}; {predicted}. Compare the two only if they are the same."] if measurement.workload else []


def how_line(measurement: Measurement) -> str:
    """Return the backend, process group and machine of the run."""
    environment, steps = measurement.environment, len(measurement.steps)
    versions = ", ".join(f"{name} {version}" for name, version in environment.packages.items())
    on = environment.device or environment.platform
    return (
        f"measured with backend {measurement.backend} ({measurement.tensors} tensors, process group {measurement.process_group}), "
        f"the last of {steps} step{'s' if steps > 1 else ''}; {versions} on {on}"
    )


def verdict(comparison: Comparison, *, tolerance: float) -> str:
    """Return whether prediction and measurement agree within the tolerance, and the figures that do not."""
    beyond = comparison.beyond(tolerance)
    within = f"within {100 * tolerance:g} %"
    if not beyond:
        return (
            f"It agrees {within}: peak {percent(comparison.peak.error)}, held between steps {percent(comparison.held.error)}."
        )
    figures = "; ".join(
        f"{row.what} {percent(row.error)} (predicted {format_size(row.predicted)}, measured {format_size(row.measured)})"
        for row in beyond
    )
    return f"It does not agree {within}: {figures}."


def _of_the_allocator(comparison: Comparison) -> tuple[Compared, ...]:
    """Return the estimate's allocated peak and the middle of its band of reserved memory, beside the measured figures."""
    middles = (
        Compared(f"reserved, {_SETTINGS[one.settings]}", int(one.band.expected_bytes), one.measured)
        for one in comparison.reserved
    )
    return (*comparison.allocator, *middles)


_SETTINGS = {"default": "default", "expandable_segments": "expandable segments"}


def reserved_lines(comparison: Comparison) -> Iterator[str]:
    """Yield whether reserved memory is within the estimate's bands, and the result on a GPU of the job's size."""
    for one in comparison.reserved:
        where = "inside" if one.inside else "OUTSIDE"
        band = f"{format_gib(int(one.band.low_bytes))} to {format_gib(int(one.band.high_bytes))}"
        yield f"Reserved, {_SETTINGS[one.settings]}: {format_gib(one.measured)}, {where} the estimate's range of {band}."
    yield from map(_on_card, (one for one in comparison.reserved if one.card is not None))
    if comparison.contradicted:
        yield "According to the estimate the job fits, but this replay runs out of memory."


def _on_card(one: Reserved) -> str:
    card = one.card
    assert card is not None  # noqa: S101  its callers have looked
    begin = f"Replayed with a card of this size, {_SETTINGS[one.settings]}: the allocator has {format_gib(card.room_bytes)}"
    if not card.retries:
        return f"{begin}, enough for all that it reserves."
    freed = f"{begin}, less than it would reserve. It frees cached blocks and tries again {plural(card.retries, 'time')}"
    if not card.fits:
        return f"{freed}, and still runs out of memory in the {card.phase}."
    often = f"{card.retries_in_last_step:,} of them" if card.retries_in_last_step else "never"
    return f"{freed}, {often} in the last step. The job runs, with {format_gib(card.reserved_bytes)} reserved at most."


def _reserved_payload(one: Reserved) -> dict[str, object]:
    low, expected, high = map(int, one.band)
    band = {"low_bytes": low, "expected_bytes": expected, "high_bytes": high}
    card = None if one.card is None else asdict(one.card)
    return {"settings": one.settings, **band, "measured_bytes": one.measured, "inside": one.inside, "card": card}


def _memory(comparison: Comparison) -> tuple[Compared, ...]:
    return (comparison.peak, *comparison.of_first, *comparison.phases, comparison.held, *comparison.off_gpu)


def _by_disagreement(rows: tuple[Compared, ...]) -> list[Compared]:
    return sorted((row for row in rows if row.predicted or row.measured), key=lambda row: -abs(row.difference))


def compared_table(title: str, rows: tuple[Compared, ...]) -> Iterator[str]:
    """A table of predicted and measured figures in one pair of units, the largest difference first."""
    ordered = _by_disagreement(rows)
    if not ordered:
        return
    unit = _unit(ordered)
    decimal, decimal_bytes, binary, _ = unit
    yield f"{title:<{_WHAT + 2}}{'predicted':>22}{'measured':>22}{'error':>13}"
    yield " " * (_WHAT + 2) + f"{binary:>11}{decimal:>11}" * 2
    for row in ordered:
        yield f"  {row.what:<{_WHAT}}{_both(row.predicted, unit)}{_both(row.measured, unit)} {_error(row, decimal_bytes):>12}"


def _unit(rows: list[Compared]) -> tuple[str, int, str, int]:
    """Return one pair of units for the whole table, so that readers can compare its figures."""
    largest = max(max(row.predicted, row.measured) for row in rows)
    if largest >= GB:
        return ("GB", GB, "GiB", GIB)
    return ("MB", MB, "MiB", MIB) if largest >= MB else ("kB", KB, "KiB", KIB)


def _both(n_bytes: int, unit: tuple[str, int, str, int]) -> str:
    return f"{n_bytes / unit[3]:>11,.3f}{n_bytes / unit[1]:>11,.3f}"


def _markdown_table(title: str, rows: tuple[Compared, ...]) -> Iterator[str]:
    ordered = _by_disagreement(rows)
    if not ordered:
        return
    yield f"| {title} | predicted GiB | GB | measured GiB | GB | error |"
    yield "|---|---:|---:|---:|---:|---:|"
    for row in ordered:
        amounts = (f"{n_bytes / unit:,.3f}" for n_bytes in (row.predicted, row.measured) for unit in (GIB, GB))
        yield f"| {row.what} | {' | '.join(amounts)} | {_error(row, GB)} |"


def percent(error: float) -> str:
    """Return an error for a reader; large ones as a multiple.

    >>> percent(-0.00001), percent(0.5), percent(11.0)
    ('+0.00 %', '+50.00 %', '12 times')
    """
    if error == float("inf"):
        return "unmeasured"
    return f"{round(100 * error, 2) + 0.0:+.2f} %" if error < 10 else f"{error + 1:,.0f} times"


def _error(row: Compared, shown_in: int) -> str:
    """Return a row's error; empty if both figures print as 0.000 in the table's unit."""
    seen = max(row.predicted, row.measured) / shown_in >= _LEAST_SHOWN
    return percent(row.error) if seen else "negligible"


#: The smallest value that prints as 0.001.
_LEAST_SHOWN = 0.0005


def row_payload(row: Compared) -> dict[str, object]:
    """Return one figure as data; an error without a measurement is null."""
    error = None if row.error == float("inf") else row.error
    return {"what": row.what, "predicted_bytes": row.predicted, "measured_bytes": row.measured, "error": error}


def _remarks(measurement: Measurement) -> Iterator[str]:
    if measurement.remarks:
        yield "Remarks"
        yield from (item(remark, 110) for remark in measurement.remarks)
