"""Draws series as rows of coloured characters for a terminal of any width; letters where it lacks block characters."""

import textwrap
from collections.abc import Iterator
from math import log
from typing import TYPE_CHECKING, NamedTuple

from zeroplan.report.comparison import percent
from zeroplan.report.palette import BLUE, ENGINES, LOOKS, ORANGE, STAGES, VERMILLION
from zeroplan.report.series.heat import HeatSeries
from zeroplan.report.series.parts import Caption, Part, kinds_of
from zeroplan.report.series.scaling import Point, ScalingLine, ScalingSeries
from zeroplan.report.series.stages import StagesSeries
from zeroplan.report.series.timeline import TimelineSeries
from zeroplan.report.series.validation import ValidationSeries
from zeroplan.report.words import plural, spread
from zeroplan.units import GIB

if TYPE_CHECKING:
    from zeroplan.report.series.pareto import ParetoSeries  # imports the planner and NumPy


class Segment(NamedTuple):
    """A piece of a row and its colour, if any."""

    text: str
    colour: str = ""


Row = tuple[Segment, ...]

_LEAST_BAR = 10
_FRONT = 10
"""Most rows of a Pareto front: both ends, and some between."""


def stages_bars(series: StagesSeries, *, width: int, signs: bool) -> list[Row]:
    """Return a bar per stage, with the capacity marked."""
    return [
        *_head(series.caption, width),
        *_stages(series, width, signs=signs),
        (),
        *_legend([c.parts for c in series.columns], signs=signs),
    ]


def _stages(series: StagesSeries, width: int, *, signs: bool) -> Iterator[Row]:
    longest = max([column.needed_bytes for column in series.columns] + [series.capacity_bytes or 0, 1])
    for column in series.columns:
        name = f"stage {column.stage}"
        if column.refusal:
            yield (Segment(name),)
            yield from _indented(column.refusal, width)
            continue
        figure = f"{column.needed_bytes / GIB:>10,.2f} GiB  {'' if column.verdict == 'unknown' else column.verdict}"
        room = max(_LEAST_BAR, width - len(name) - 2 - 30)
        bar = _bar(column.parts, room, longest, signs=signs)
        yield (Segment(f"{name}  "), *_marked(bar, room, series.capacity_bytes, longest, signs=signs), Segment(figure))
        yield from _indented(f"{column.engine}; peak: {column.moment}", width)


def _indented(words: str, width: int) -> Iterator[Row]:
    return ((Segment(line),) for line in textwrap.wrap(words, width, initial_indent=" " * 9, subsequent_indent=" " * 9))


def _marked(bar: list[Segment], room: int, capacity: int | None, longest: int, *, signs: bool) -> list[Segment]:
    """Return a bar filled up to its width, with a line at the GPU's capacity."""
    cells = [(sign, segment.colour) for segment in bar for sign in segment.text]
    cells += [(" ", "")] * (room - len(cells))
    if capacity is not None and (at := round(capacity / longest * room)) <= room:
        cells.insert(at, ("│" if signs else "|", ""))
    else:
        cells.append((" ", ""))
    return [Segment(sign, colour) for sign, colour in cells]


def _bar(parts: tuple[Part, ...], room: int, longest: int, *, signs: bool) -> list[Segment]:
    """Return parts side by side; rounds the ends of parts, so the total length is right."""
    made, before, end = [], 0, 0
    for part in parts:
        end += part.n_bytes
        cells = round(end / longest * room) - before
        before += cells
        look = LOOKS[part.what]
        made.append(Segment((look.sign if signs else look.letter) * cells, look.colour))
    return made


def _head(caption: Caption, width: int) -> list[Row]:
    lines = [part for line in (caption.title, *caption.lines) for part in textwrap.wrap(line, width)]
    return [*((Segment(line),) for line in lines), ()]


def _legend(stacks: list[tuple[Part, ...]], *, signs: bool) -> Iterator[Row]:
    for what in kinds_of(tuple(stacks)):
        look = LOOKS[what]
        yield (Segment(f"  {(look.sign if signs else look.letter) * 2}", look.colour), Segment(f" {what}"))


def timeline_bars(series: TimelineSeries, *, width: int, signs: bool) -> list[Row]:
    """Return a bar per moment, with the peak marked, and the record's measured peak of each phase below."""
    return [
        *_head(series.caption, width),
        *_instants(series, width, signs=signs),
        (),
        *_legend([i.parts for i in series.instants], signs=signs),
    ]


def _instants(series: TimelineSeries, width: int, *, signs: bool) -> Iterator[Row]:
    longest = max([instant.total_bytes for instant in series.instants] + [one.n_bytes for one in series.measured])
    name_width = min(max(len(instant.name) for instant in series.instants), max(width // 2 - 10, 16))
    room = max(_LEAST_BAR, width - name_width - 24)
    measured = {one.last: one for one in series.measured}
    phase = ""
    for at, instant in enumerate(series.instants):
        if instant.phase != phase:
            phase = instant.phase
            yield (Segment(phase),)
        name = _padded(instant.name, name_width, signs=signs)
        bar = _marked(_bar(instant.parts, room, longest, signs=signs), room, None, longest, signs=signs)
        peak = f" {'◀' if signs else '<'} peak" if at == series.peak else ""
        yield (Segment(f"  {name} "), *bar, Segment(f"{instant.total_bytes / GIB:>9,.2f} GiB{peak}"))
        if at in measured:
            one = measured[at]
            cells = ("─" if signs else "-") * round(one.n_bytes / longest * room)
            yield (Segment(f"  {_padded(f'measured, {one.phase}', name_width, signs=signs)} "),
                   Segment(f"{cells:<{room}} {one.n_bytes / GIB:>9,.2f} GiB"))  # fmt: skip


def _padded(name: str, width: int, *, signs: bool) -> str:
    end = "…" if signs else ".."
    return name.ljust(width) if len(name) <= width else f"{name[: width - len(end)]}{end}"


def scaling_bars(series: ScalingSeries, *, width: int, signs: bool) -> list[Row]:
    """Return a group of bars per number of GPUs, one per stage, on a logarithmic scale."""
    return [*_head(series.caption, width), *_scaled(series, width, signs=signs), (), *_begin(series, width)]


def _scaled(series: ScalingSeries, width: int, *, signs: bool) -> Iterator[Row]:
    every = [point.needed_bytes for line in series.lines for point in line.points]
    least, most = min(every) / 2, max(every)
    room = max(_LEAST_BAR, width - 44)
    yield (Segment(f"{'GPUs':>6}  stage   bars are logarithmic"),)
    for gpus in sorted({point.gpus for line in series.lines for point in line.points}):
        for number, (stage, point) in enumerate(_at(series, gpus)):
            look = STAGES[stage]
            cells = round(log(point.needed_bytes / least) / log(most / least) * room)
            verdict = "" if point.verdict == "unknown" else point.verdict
            yield (Segment(f"{f'{gpus:,}' if not number else '':>6}  {stage}  "),
                   Segment(("█" if signs else "#") * cells, look.colour),
                   Segment(f"{' ' * (room - cells)}{point.needed_bytes / GIB:>10,.2f} GiB  {verdict}"))  # fmt: skip


def _at(series: ScalingSeries, gpus: int) -> list[tuple[int, Point]]:
    return [(line.stage, point) for line in series.lines for point in line.points if point.gpus == gpus]


def _begin(series: ScalingSeries, width: int) -> Iterator[Row]:
    for line in series.lines:
        begins = line.refusal if not line.points else _begins(line, series.capacity_bytes)
        words = f"stage {line.stage}, {line.engine}{': ' if begins else ''}{begins}"
        yield from ((Segment(part),) for part in textwrap.wrap(words, width, subsequent_indent=" " * 9))


def _begins(line: ScalingLine, capacity: int | None) -> str:
    if capacity is None:
        return ""
    return line.fits_words


def heat_bars(series: HeatSeries, *, width: int, signs: bool) -> list[Row]:
    """Return a table of micro-batches and sequence lengths in doublings: each cell fits, is tight, or does not fit."""
    ups, downs = _doubled(series.seq_lens, series.own[1]), _doubled(series.micro_batches, series.own[0])
    most = max(1, (width - 10) // 9)
    across = ups if len(ups) <= most else [*ups[: most - 1], ups[-1]]
    rows: list[Row] = [*_head(series.caption, width), (Segment(f"GiB per GPU{'':>20}tokens per sequence"),)]
    rows.append((Segment(f"{'sequences':>9}" + "".join(f"{length:>9,}" for length in across)),))
    rows += [(Segment(f"{batch:>9,}"), *(_cell(series, batch, length, signs=signs) for length in across)) for batch in downs]
    shades = _SHADES if signs else _LETTERS
    verdicts = "" if series.capacity_bytes is None else "; ".join(f"{shades[what]} {what}" for what in shades)
    rows += [(), (Segment(f"* this job{'; ' if verdicts else ''}{verdicts}"),)]
    return rows


_SHADES = {"fits": "░", "tight": "▒", "does not fit": "█"}
_LETTERS = {"fits": ".", "tight": "~", "does not fit": "X"}
_VERDICT_COLOURS = {"fits": BLUE, "tight": ORANGE, "does not fit": VERMILLION}


def _doubled(values: tuple[int, ...], own: int) -> list[int]:
    doublings = {values[0] << power for power in range(64)}
    return [value for value in values if value in doublings or value in (own, values[-1])]


def _cell(series: HeatSeries, batch: int, length: int, *, signs: bool) -> Segment:
    row, column = series.micro_batches.index(batch), series.seq_lens.index(length)
    gib = series.needed_bytes[row][column] / GIB
    own = "*" if (batch, length) == series.own else " "
    figure = f"{gib:,.0f}" if gib >= 100 else f"{gib:.1f}"
    if series.capacity_bytes is None:
        return Segment(f"{own}{figure}".rjust(9))
    verdict = series.verdict(row, column)
    return Segment(f"{own}{figure}{(_SHADES if signs else _LETTERS)[verdict]}".rjust(9), _VERDICT_COLOURS[verdict])


def pareto_bars(series: "ParetoSeries", *, width: int, signs: bool) -> list[Row]:
    """Return a row per layout of the front, the fastest first, the best one marked, and the number of layouts."""
    named = {*spread(series.front, _FRONT), *(() if series.best is None else (series.best,))}
    front = sorted(named, key=lambda one: (-one.tokens_per_s, one.needed_bytes))
    rows: list[Row] = [*_head(series.caption, width)]
    room = max(_LEAST_BAR, width - 45)
    most = max((one.tokens_per_s for one in front), default=1.0)
    for one in front:
        bar = ("█" if signs else "#") * round(one.tokens_per_s / most * room)
        figures = f"{one.needed_bytes / GIB:>9,.1f} GiB{one.tokens_per_s:>11,.0f} tokens/s  "
        rows.append((Segment("* " if one == series.best else "  "), Segment(figures), Segment(bar, BLUE)))
        rows += _indented(one.words, width)
    rows += [(Segment("nothing fits"),)] if series.best is None else [()]
    legend = f"* best for {series.objective}; " if series.best is not None else ""
    of = f"tokens/s of one GPU; the GPU has {series.capacity_bytes / GIB:,.1f} GiB"
    some = f"; {len(front):,} of {len(series.front):,} on the front" if len(series.front) > _FRONT else ""
    return [*rows, *((Segment(line),) for line in textwrap.wrap(f"{legend}{of}{some}", width)), *_layouts(series)]


def _layouts(series: "ParetoSeries") -> Iterator[Row]:
    """Yield the number of layouts of each engine, and how they fit."""
    for engine, look in ENGINES.items():
        counts = {v: sum(one.layouts for one in series.spots if (one.engine, one.verdict) == (engine, v)) for v in _SHADES}
        counted = ", ".join(f"{count:,} {verdict}" for verdict, count in counts.items() if count)
        if counted:
            yield (Segment(f"{engine}: ", look.colour), Segment(counted))


def validation_bars(series: ValidationSeries, *, width: int, signs: bool) -> list[Row]:
    """Return a row per run, the largest error first: predicted, measured, and the error as a bar."""
    rows: list[Row] = [*_head(series.caption, width)]
    runs = sorted(series.runs, key=lambda run: -abs(run.error))
    name_width = min(max(len(run.name) for run in runs), max(16, width - 50))
    room = max(_LEAST_BAR, width - name_width - 40)
    largest = max(abs(run.error) for run in runs) or 1.0
    rows.append((Segment(f"{'':<{name_width}}{'predicted':>14}{'measured':>14}{'error':>10}"),))
    for run in runs:
        figures = f"{run.predicted_bytes / GIB:>10,.2f} GiB{run.measured_bytes / GIB:>10,.2f} GiB{percent(run.error):>10}  "
        bar = ("█" if signs else "#") * round(abs(run.error) / largest * room)
        name = _padded(run.name, name_width, signs=signs)
        rows.append((Segment(f"{name}{figures}"), Segment(bar, ENGINES[run.engine].colour)))
    within = "; ".join(f"{sum(abs(run.error) <= limit for run in runs):,} within {100 * limit:g} %" for limit in series.limits)
    return [*rows, (), (Segment(f"of {plural(len(runs), 'run')}: {within}"),)]
