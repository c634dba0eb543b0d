"""Tables of the errors of estimates, compared with stored records and published figures."""

from __future__ import annotations

import tomllib
from functools import cache
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from tests.docs.generated.markdown import table
from tests.measured import deviations, megatron_golden, reserved_on_gpus, stored, throughput
from tests.measured.errors import held_in
from tests.on_gpus.figures import ESTIMATE, ninety, sources
from tests.on_gpus.gpu_records import seen
from tests.on_gpus.step_times import timed
from zeroplan.carried import FITTED, Parts
from zeroplan.comparison import compare_with_estimate
from zeroplan.engines.requests import not_written
from zeroplan.replay import StepReplay

if TYPE_CHECKING:
    from collections.abc import Iterator

_PUBLISHED = Path(__file__).parents[2] / "on_gpus" / "published.toml"


def truth() -> str:
    """Return the table of what the estimate and the simulator were compared with, in how many jobs, and their errors."""
    rows = [_engines(), *_on_our_card(), *_published(), *_on_gpus()]
    return table(("compared", "with", "jobs:", "error of the peak"), rows)


def _engines() -> tuple[str, ...]:
    errors = [one.error for name in (stored.RECORDS, stored.OPTIONS, *stored.VARIED) for one in held_in(name)]
    return ("`zeroplan estimate`", "the engines' own code, run without a GPU", f"{len(errors):,}", _spread(errors))


_TENTH = 0.001


def _on_our_card() -> Iterator[tuple[str, ...]]:
    """Yield the rows for the records of real GPUs: the errors of the estimate, and of the replay of its requests."""
    records = [one.record for one in seen() if one.record is not None]
    peaks = [compare_with_estimate(record).peak.error for record in records]
    yield ("`zeroplan estimate`", _CARD, f"{len(peaks)}", _spread(peaks))
    replayed = [record for record in records if not not_written(record.job)]
    shown = [(StepReplay(record.job, starts="built").replayed(), record.allocator[0]) for record in replayed]
    allocated = [found.allocated_bytes / truth.allocated_bytes - 1 for found, truth in shown]
    reserved = [found.reserved_bytes / truth.reserved_bytes - 1 for found, truth in shown]
    yield ("`zeroplan estimate --replay`, allocated", _CARD, f"{len(shown)}", _spread(allocated))
    yield ("`zeroplan estimate --replay`, reserved", _CARD, f"{len(shown)}", _spread(reserved))


_CARD = "the engines on one H100 of 80 GB, as one rank of up to 64"


def _spread(errors: list[float]) -> str:
    within = sum(abs(error) <= _TENTH for error in errors)
    return f"median {median(map(abs, errors)):.3%}; within 0.1 % in {within:,}; from {min(errors):+.2%} to {max(errors):+.2%}"


def _published() -> Iterator[tuple[str, ...]]:
    rows = tomllib.loads(_PUBLISHED.read_text(encoding="utf-8"))["row"]
    simulated = [row for row in rows if row["how"] == "simulated"]
    same = sum(row["measured"] == row["predicted"] for row in simulated)
    yield (
        "the source's own program, run by our simulator", "GPUs, as the source published", f"{len(simulated)}",
        f"equal to the last printed digit in {same}",
    )  # fmt: skip
    torchtitan = [row for row in rows if row["how"] == "estimate" and "torchtitan" in row["source"]]
    for words, what in (("the plain estimate", "`zeroplan estimate`"), ("--keep-logits", "the same with `--keep-logits fp32`")):
        some = [row for row in torchtitan if words in row["what"]]
        errors = (f"{float(row['predicted']) / float(row['measured']) - 1:+.1%}" for row in some)
        yield (what, "GPUs running torchtitan of March 2024, which kept fp32 logits", f"{len(some)}", ", ".join(errors))


def _on_gpus() -> Iterator[tuple[str, ...]]:
    """Yield a row for every source that publishes more than 20 runs: the error of the plain estimate."""
    for source in sources():
        errors = [one.error for one in source.figures if one.how == ESTIMATE]
        if len(errors) > 20:
            extremes = f"from {min(errors):+.1%} to {max(errors):+.1%}"
            shown = f"median {median(errors):+.2%}; 90 in 100 within {ninety(errors):.1%}; {extremes}"
            yield "`zeroplan estimate`", f"GPUs: {source.name}", f"{len(errors)}", shown
    kept = [one.error(replayed=True) for one in reserved_on_gpus.scored()]
    shown = f"median {median(kept):+.2%}; 90 in 100 within {ninety(kept):.1%}; from {min(kept):+.1%} to {max(kept):+.1%}"
    names = "prime-rl, torchtitan and peft, on up to 128 GPUs of six kinds"
    yield "`zeroplan estimate --replay`, reserved", f"GPUs: {names}", f"{len(kept)}", shown


def megatron_runs() -> str:
    """Return the errors of engine megatron for the peaks of Megatron-LM's own tests, by model type and GPU."""
    held, _ = megatron_golden.score(megatron_golden.kept())
    head = (
        "model",
        "GPU",
        "runs:",
        "error of the peak, median:",
        "of its absolute value:",
        "lowest:",
        "highest:",
        "of what is held:",
    )
    return table(
        head, [(*row[:2], *(figure.replace("%", " %") for figure in row[2:])) for row in megatron_golden.summary(held)]
    )


def megatron_refused() -> str:
    """Return why engine megatron refuses some of those runs, and how many."""
    _, refused = megatron_golden.score(megatron_golden.kept())
    return table(("why", "runs:"), [(reason, str(count)) for reason, count in sorted(refused.items(), key=lambda one: -one[1])])


@cache
def _scored() -> list[throughput.Scored]:
    return throughput.score(throughput.kept())[0]


def card_times() -> str:
    """Return the measured step times of our GPU, fastest and median, with the predicted time and its error."""
    heads = ("job", "fastest, s:", "median, s:", "predicted, s:", "error:", "")
    return table(heads, [
        (one.name, f"{one.quickest:.3f}", f"{one.middle:.3f}", f"{one.predicted:.3f}", f"{one.error:+.0%}",
         "gave a launch time" if one.gave else "")
        for one in timed()
    ])  # fmt: skip


def step_times() -> str:
    """Return the errors of predicted step times for published ones, by group."""
    heads = ("by", "", "rows:", "median of the error:", "90 in 100 within:", "signed median:")
    return table(heads, [
        (kind, name, str(count), f"{middle:.1%}", f"{wide:.1%}", f"{signed:+.1%}")
        for kind, name, count, middle, wide, signed in throughput.table(_scored())
    ])  # fmt: skip


def step_pairs() -> str:
    """Return how often zeroplan predicts which of two published layouts is faster, by the setting that differs."""
    found = _scored()
    held = [one for one in found if throughput.half_of(one.case.row) == "held"]
    halves = throughput.pairs(found), throughput.pairs(held)
    return table(("the two differ in", "of all:", "of those never fitted on:"), [
        (_AXES.get(name, name), *(f"{half[name][0]} of {half[name][1]}" if name in half else "" for half in halves))
        for name in sorted(halves[0])
    ])  # fmt: skip


def calibrated() -> str:
    """Return the errors of published rows with and without a calibrating run, on the same pairs of rows."""
    heads = ("half", "calibrated by", "pairs:", "median without:", "90 in 100 without:", "median with:", "90 in 100 with:")
    return table(heads, [
        (half, name, f"{count:,}", *(f"{figure:.1%}" for figure in figures))
        for half, name, count, *figures in deviations.table(_scored())
    ])  # fmt: skip


def shared_deviations() -> str:
    """Return the parts of a run's deviation, and who shares them."""
    whole = sum(size**2 for size in FITTED)
    return table(("part", "shared by", "standard deviation:", "of the variance:"), [
        (name, _SHARED_BY[name], f"{size:.1%}", f"{size**2 / whole:.0%}")
        for name, size in zip(Parts._fields, FITTED, strict=True)
    ])  # fmt: skip


_SHARED_BY = {
    "machine": "all jobs on these GPUs, with their network, host and program", "model": "jobs of the same model",
    "kernels": "jobs with the same kernels, precision and recomputation",
    "split": "jobs with the same tensor, pipeline, context and expert parallelism",
    "layout": "jobs that have all of these in common, and micro-batch and sequence", "own": "nobody",
}  # fmt: skip
_AXES = {
    "all": "anything", "micro_batch": "the micro-batch alone", "tp": "tensor parallelism alone", "pp": "the pipeline alone",
    "recompute": "recomputation alone", "flash": "the attention kernel alone", "vpp": "chunks alone",
    "sequence_parallel": "sequence parallelism alone",
}  # fmt: skip
