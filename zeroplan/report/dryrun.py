"""Renders a dry run's answer on one screen: verdict, peak, tensors alive then, the GPU's memory, assumptions."""

import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from zeroplan.catalog.gpu import gpu as gpu_named
from zeroplan.engines.device import Outside, outside_beside, total_band
from zeroplan.ledger import Band
from zeroplan.report.tables import Table
from zeroplan.report.words import COLUMNS, filled, paragraphs, plural
from zeroplan.script_run import DryRun, Part, PhaseOfRun
from zeroplan.units import GIBIBYTES, Unit

_NO_NAME = "the model as a whole"
_LAYER = re.compile(r"(^|\.)\d+(\.|$)")
_WRAPPERS = {"module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}
_NAME = 42
"""Columns of a module's or a line's name. [characters]"""
_FEW = 5
"""Rows of each kind on one screen; ``verbose`` shows all."""


def dry_run_text(found: DryRun, *, verbose: bool = False, unit: Unit = GIBIBYTES) -> str:
    """Return the answer as text of ``COLUMNS`` columns, all sizes in one unit."""
    small = small_unit(found, unit)
    table, most = Table(small, what=_NAME + 2), None if verbose else _FEW
    parts = [
        [*filled(verdict(found, unit)), *filled(_what(found)), *filled(_peak(found, small))],
        list(_alive(found, table, most)),
        list(_phases(found, table, verbose=verbose)),
        list(_named("By module at the peak", found.modules, table, most)),
        list(_named("By line of code at the peak", found.lines, table, most)),
        list(_steps(found, table)) if verbose else [],
        list(_collectives(found, table)) if verbose else [],
        list(_operators(found)) if verbose else [],
        list(_savings(found, small)) if verbose else [],
        list(_assumed_values(found, most)),
        [*_replaced_code(found, verbose=verbose), *_remarks(found, verbose=verbose)],
    ]
    return paragraphs(parts)


def small_unit(found: DryRun, unit: Unit) -> Unit:
    """Return the unit; for a small script the next smaller one, so that its rows are not all zero."""
    name, n_bytes = unit.smaller[0]
    return unit if found.peak_bytes >= unit.n_bytes else Unit(name, n_bytes, unit.smaller[1:])


def needed_bytes(found: DryRun) -> int:
    """Return the memory that the GPU must have: the allocator's peak, CUDA graphs' pools, memory outside it. [bytes]"""
    return _counted(found) + found.kept_by_graphs_bytes + int(total_band(outside(found)).expected_bytes)


def outside(found: DryRun) -> tuple[Outside, ...]:
    """Return context, a communicator for each size of group in the last step, and libraries' own buffers. [bytes]"""
    sizes = {one.group for one in found.collectives if one.group > 1}
    own = (
        Outside(one.what, Band(one.low_bytes, one.expected_bytes, one.high_bytes), one.source) for one in found.outside_buffers
    )
    return (*outside_beside(max(len(sizes), int(found.gpus > 1)), gpu_named(found.gpu).name), *own)


def _counted(found: DryRun) -> int:
    steps = (phase.counted_bytes or phase.peak_bytes for step in found.steps for phase in step.phases)
    return max(found.initialisation.peak_bytes, *(phase.counted_bytes for phase in found.phases), *steps)


def fits(found: DryRun) -> bool:
    """Whether a replay of the requests succeeds on a GPU of that size."""
    shown = found.allocator[0].card
    whole = int(gpu_named(found.gpu).memory_bytes.value)
    return needed_bytes(found) <= whole and (shown is None or shown.fits)


def verdict(found: DryRun, unit: Unit) -> str:
    """Return one sentence: whether the script fits, the memory it needs, the GPU's memory."""
    gpu = gpu_named(found.gpu)
    has, needs = int(gpu.memory_bytes.value), needed_bytes(found)
    routed = routing(found)
    if fits(found):
        return f"Fits: needs {unit.size(needs)} of the {unit.size(has)} of an {gpu.full_name}{routed}."
    if needs <= has:
        return (
            f"Does not fit: needs {unit.size(needs)} of the {unit.size(has)} of an {gpu.full_name}{routed}, but the "
            f"allocator cannot place it; try PYTORCH_ALLOC_CONF=expandable_segments:True."
        )
    return f"Does not fit: needs {unit.size(needs)}, and an {gpu.full_name} has {unit.size(has)}{routed}."


def routing(found: DryRun) -> str:
    """Return the assumed choices among scores (routing) on which sizes depend; empty without any."""
    if found.imbalance is None:
        return ""
    if found.imbalance == 1:
        return ", if every expert is chosen as often as any other"
    return f", if this rank's experts receive {found.imbalance:g} times the even share of tokens"


def _what(found: DryRun) -> str:
    steps = plural(len(found.steps), "optimizer step")
    host = "" if found.host_bytes is None else f" and {found.host_bytes / 2**30:.1f} GiB of this machine's memory"
    ran = f"{found.command[0]} ran as rank {found.rank} of {found.gpus:,} without a GPU: {steps}, {found.seconds:.0f} s{host}."
    return f"{ran}{_other_ranks(found)}"


def _other_ranks(found: DryRun) -> str:
    """Return a sentence about the other ranks that ran; empty if none did."""
    if not found.companions:
        return ""
    ranks, sends = ", ".join(map(str, found.companions)), "it sends" if len(found.companions) == 1 else "they send"
    return f" {plural(len(found.companions), 'further rank')} ran beside it for what {sends}: {ranks}."


def _peak(found: DryRun, unit: Unit) -> str:
    steady = found.steps[-1].peak
    at = f", in {steady.module}" if steady.module else ""
    operation = f" ({steady.operation.removesuffix('.default')})" if steady.operation else ""
    text = f"Peak allocated: {unit.size(steady.peak_bytes)} in {steady.phase}{at}{operation}{routing(found)}."
    others = [(one.peak_bytes, f"in {one.phase}") for one in found.phases]
    others += [(step.peak.peak_bytes, f"in {step.peak.phase} of an earlier step") for step in found.steps[:-1]]
    highest, when = max([*others, (found.initialisation.peak_bytes, "before the first step")], key=lambda one: one[0])
    return f"{text} Higher {when}: {unit.size(highest)}." if highest > steady.peak_bytes else text


def _phases(found: DryRun, table: Table, *, verbose: bool) -> Iterator[str]:
    """Yield each phase's peak with its line of code; all steps share one row with the highest peak."""
    if not found.phases:
        return
    yield table.head("Peak of each phase")
    for at, one in enumerate(found.phases):
        yield table.row(one.phase, one.peak_bytes, _where(one))
        yield from (f"    {name}: {table.unit.size(n_bytes)}" for name, n_bytes in _largest(one) if verbose)
        if not at:
            step = max((step.peak for step in found.steps), key=lambda phase: phase.peak_bytes)
            yield table.row(f"training, in {step.phase}", step.peak_bytes)


def _where(one: PhaseOfRun) -> str:
    """Return the line of code of a phase's peak, shortened to the room."""
    room = COLUMNS - _NAME - 16
    return one.line if len(one.line) <= room else f"…{one.line[1 - room :]}"


def _largest(one: PhaseOfRun) -> list[tuple[str, int]]:
    return sorted(one.kinds.items(), key=lambda kind: -kind[1])


def _alive(found: DryRun, table: Table, most: int | None) -> Iterator[str]:
    """Yield the tensors alive at the peak, and the GPU's memory then."""
    yield table.head("On the card at the peak")
    kinds = sorted(found.steps[-1].peak.kinds.items(), key=lambda one: -one[1])
    yield from _rows(kinds, table, most)
    yield table.total("peak allocated", found.steps[-1].peak.peak_bytes)
    if found.kept_by_graphs_bytes:
        yield table.row("free in pools of CUDA graphs", found.kept_by_graphs_bytes, "nothing else can have it")
    for part in outside(found):
        yield table.band_row(part.what, part.band)
    yield table.row("reserved by the allocator", found.allocator[0].reserved_bytes, "default settings")
    yield table.row("held between steps", found.steps[-1].held_bytes)


def _rows(rows: Iterable[tuple[str, int]], table: Table, most: int | None) -> Iterator[str]:
    """Yield the largest rows, and the rest in one row."""
    every = list(rows)
    shown = every if most is None or len(every) <= most else every[: most - 1]
    yield from (table.row(name, n_bytes) for name, n_bytes in shown)
    if rest := every[len(shown) :]:
        yield table.row(f"{len(rest)} smaller", sum(n_bytes for _, n_bytes in rest))


def _named(title: str, parts: Sequence[Part], table: Table, most: int | None) -> Iterator[str]:
    """Yield bytes by module or line, summed over kinds; layers of one kind share a row."""
    found: Counter[str] = Counter()
    for part in parts:
        found[shown_name(part.name)] += part.n_bytes
    yield table.head(title)
    yield from _rows(found.most_common(), table, most)


def shown_name(name: str) -> str:
    """Return a module's name with ``*`` for layer numbers, without wrappers; only its end if it is long.

    >>> shown_name("module.layers.3._checkpoint_wrapped_module.mlp")
    'layers.*.mlp'
    """
    plain = _LAYER.sub(r"\1*\2", ".".join(part for part in name.split(".") if part not in _WRAPPERS))
    return f"…{plain[1 - _NAME :]}" if len(plain) > _NAME else plain or _NO_NAME


def _steps(found: DryRun, table: Table) -> Iterator[str]:
    yield table.head("Peaks of every step")
    yield table.row("before the first step", found.initialisation.peak_bytes)
    for number, step in enumerate(found.steps, 1):
        for phase in step.phases:
            yield table.row(f"step {number}, {phase.phase}", phase.peak_bytes)


def _collectives(found: DryRun, table: Table) -> Iterator[str]:
    if found.collectives:
        yield table.head("Collectives of the last step")
    for one in found.collectives:
        yield table.row(f"{one.operation} ({one.phase})", one.n_bytes, f"{one.calls} x {one.dtype}, {one.group} ranks")


def _operators(found: DryRun) -> Iterator[str]:
    """Yield the FLOPs and bytes of the last step's operators."""
    if (one := found.operators) is None:
        return
    again = f", {_teras(one.recomputed_flops)} of them again in the backward" if one.recomputed_flops else ""
    yield from filled(
        f"Operators of the last step: {one.count:,} on {plural(one.streams, 'stream')}. They compute {_teras(one.flops)}{again}; "
        f"the model's are {_teras(one.model_flops)}. They read {one.read_bytes / 2**30:,.1f} GiB and write "
        f"{one.written_bytes / 2**30:,.1f} GiB."
    )


def _teras(flops: int) -> str:
    return f"{flops / 10**12:,.2f} TFLOP" if flops >= 10**10 else f"{flops / 10**6:,.2f} MFLOP"


def _indented(text: str) -> list[str]:
    return textwrap.wrap(text, COLUMNS, initial_indent="  ", subsequent_indent="    ")


def _savings(found: DryRun, unit: Unit) -> Iterator[str]:
    """Yield possible changes with an upper bound of the memory that each saves."""
    if found.savings:
        yield "What would free how much of the last step's peak, at most"
    for one in found.savings:
        where = f": {', '.join(one.of)}" if one.of else ""
        yield from _indented(f"up to {unit.size(one.at_most_bytes)} by {one.change}{where}")


def _assumed_values(found: DryRun, most: int | None) -> Iterator[str]:
    """Yield the values that the script read and that zeroplan assumed."""
    if not found.made_up:
        return
    yield "Invented values: the script read these from tensors without data"
    for one in found.made_up[:most]:
        yield from _indented(f"{one.line or 'a library'} read {one.read} and got {one.said} ({one.count}x)")
    if most is not None and len(found.made_up) > most:
        yield f"  {len(found.made_up) - most} more: add -v."


def _replaced_code(found: DryRun, *, verbose: bool) -> Iterator[str]:
    """Yield the replaced library code; with ``verbose`` also the replacements."""
    if not found.stood_in:
        return
    if not verbose:
        yield from filled(f"Replaced: {', '.join(one.what for one in found.stood_in)}. -v lists the replacements.")
        return
    yield "Replaced, since it needs a GPU or would write files"
    for one in found.stood_in:
        yield from _indented(f"{one.what}: {one.by} ({one.count:,}x)")


def _remarks(found: DryRun, *, verbose: bool) -> Iterator[str]:
    if verbose:
        yield from (line for one in found.remarks for line in filled(f"Note: {one}."))
    if found.compiler_left_out:
        yield from filled("Note: torch.compile was off. Every figure is for the script without it, which keeps more memory.")
    if found.before_capture:
        yield from filled(
            "Note: the last step ran on a stream beside the default one. If it warms up a CUDA graph, ask for more --steps, or "
            "--until-end, so that the run comes to the capture."
        )
    if found.ended == "time over":
        yield from filled("Note: the script was stopped at --timeout. Nothing is known of what it would have done later.")
    elif found.ended == "script ended" and not verbose:
        yield from filled(f"Note: the script ended after {plural(len(found.steps), 'optimizer step')}.")
