"""Turns a record, a dry run or a snapshot of torch's allocator into a side of a comparison."""

from collections import Counter
from collections.abc import Sequence

from zeroplan.differences.settings import settings_of, text_of
from zeroplan.differences.side import At, Held, Sent, Side, layers_together, of_kinds, with_remainder
from zeroplan.measurement import AllocatorMeasured, CollectiveMeasured, Environment, Measurement, PhaseMeasured, StepMeasured
from zeroplan.script_run import DryRun
from zeroplan.snapshots.diagnosis import moment_of, place
from zeroplan.snapshots.frames import MODULE, OPERATOR
from zeroplan.snapshots.kinds import Part, sorted_into_kinds
from zeroplan.snapshots.lives import Life, alive, lives_of
from zeroplan.snapshots.reading import Snapshot, Stack


def of_record(measured: Measurement, name: str = "") -> Side:
    """Return the side of a record's steady state, by kind."""
    steady = measured.steady
    away = {"host memory": steady.host_bytes, "NVMe": measured.nvme_bytes}
    run = {"backend": measured.backend, "tensors": measured.tensors, "rank": text_of(measured.rank)}
    return Side(
        name=name,
        is_a="record",
        grain="kind",
        peak=_phase(steady.peak),
        moments=tuple(_phase(phase) for phase in steady.phases),
        held=of_kinds(steady.held_kinds, steady.held_bytes),
        sent=_sent(measured.collectives),
        totals=_totals(steady, measured.allocator) | {what: size for what, size in away.items() if size is not None},
        settings=settings_of(measured.job) | run | _versions(measured.environment),
        job=measured.job,
        tensors=measured.tensors,
    )


def of_dry_run(run: DryRun, name: str = "") -> Side:
    """Return the side of a dry run's last step, by module; the same module of all layers counts as one."""
    last = run.steps[-1]
    return Side(
        name=name,
        is_a="dry run",
        grain="module",
        peak=_phase(last.peak)._replace(lines=_modules(run)),
        moments=tuple(_phase(phase) for phase in last.phases),
        held=of_kinds(last.held_kinds, last.held_bytes),
        sent=_sent(run.collectives),
        totals=_totals(last, run.allocator),
        settings={
            "command": " ".join(run.command), "gpus": text_of(run.gpus), "gpu": run.gpu, "rank": text_of(run.rank),
            **_versions(run.environment),
        },
    )  # fmt: skip


def _modules(run: DryRun) -> tuple[Held, ...]:
    """The bytes alive at the peak by kind and module, with a remainder per kind without a module."""
    peak, found = run.steps[-1].peak, Counter[tuple[str, str]]()
    for part in run.modules:
        found[part.kind, layers_together(part.name)] += part.n_bytes
    of_kind = Counter[str]()
    for (kind, _), n_bytes in found.items():
        of_kind[kind] += n_bytes
    left = ((kind, n_bytes - of_kind[kind]) for kind, n_bytes in peak.kinds.items())
    named = [Held(kind, module, n_bytes) for (kind, module), n_bytes in found.items() if n_bytes]
    return with_remainder((*named, *(Held(kind, "", size) for kind, size in left if size)), peak.peak_bytes)


def _phase(phase: PhaseMeasured) -> At:
    where = ": ".join(part for part in (layers_together(phase.module), phase.operation) if part)
    name = f"{phase.phase} ({where})" if where else phase.phase
    return At(name, phase.phase, phase.peak_bytes, of_kinds(phase.kinds, phase.peak_bytes))


def _totals(step: StepMeasured, allocator: Sequence[AllocatorMeasured]) -> dict[str, int]:
    reserved = next((shown.reserved_bytes for shown in allocator if shown.settings == "default"), None)
    held = {"held between steps": step.held_bytes}
    return held if reserved is None else held | {"reserved by the allocator": reserved}


def _sent(collectives: Sequence[CollectiveMeasured]) -> tuple[Sent, ...]:
    """The collectives, without those in groups of one rank, which move nothing."""
    return tuple(Sent(one.operation, f"{one.dtype}, {one.phase}", one.n_bytes) for one in collectives if one.group > 1)


def _versions(environment: Environment) -> dict[str, str]:
    return {**environment.packages, "device": environment.device or environment.platform}


def of_snapshot(snapshot: Snapshot, name: str = "") -> Side:
    """Return the side of a snapshot at its failed request or its peak, by kind and the line of code that requested."""
    lives = lives_of(snapshot)
    found = sorted_into_kinds(snapshot, lives)
    at, failure = moment_of(snapshot, lives)
    part = (found.parts[at] if at >= 0 else Part.OTHER).value
    kinds = dict(zip(lives.blocks, found.kinds, strict=True))
    ran_out = "" if failure is None else ", out of memory"
    return Side(
        name=name,
        is_a="snapshot",
        grain="place",
        peak=At(f"{part}{ran_out}", part, lives.live_bytes[at + 1], _places(alive(lives, at), kinds)),
        totals={"reserved by the allocator": snapshot.reserved_bytes},
    )


def _places(lives: Sequence[Life], kinds: dict[Life, str]) -> tuple[Held, ...]:
    """One line per kind and place in code, with the number of blocks of each size."""
    blocks: dict[tuple[str, str], Counter[int]] = {}
    for life in lives:
        blocks.setdefault((kinds[life], _place(life.stack)), Counter())[life.n_bytes] += 1
    return tuple(
        Held(kind, where, sum(size * count for size, count in sizes.items()), tuple(sorted(sizes.items(), reverse=True)))
        for (kind, where), sizes in blocks.items()
    )


def _place(stack: Stack) -> str:
    """The line of code that made the request; in zeroplan's own snapshots the module and operator."""
    named = {frame.file: frame.name for frame in stack if frame.file in (OPERATOR, MODULE)}
    if OPERATOR in named:
        return f"{layers_together(named.get(MODULE, ''))}: {named[OPERATOR]}"
    return place(stack)
