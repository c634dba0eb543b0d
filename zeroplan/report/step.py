"""Renders the time of a step as text and data: parts, overlap, tokens per second, MFU."""

import textwrap
from collections.abc import Iterator, Sequence

from zeroplan.calibration import Learnt
from zeroplan.estimator import Estimate
from zeroplan.report.layout import layout_words
from zeroplan.report.payload import SCHEMA_VERSION
from zeroplan.report.words import WIDTH, model_words, notes_part, paragraphs, verdict_sentence
from zeroplan.steptime import Part, StepTime


def step_text(answer: Estimate, time: StepTime, learnt: Learnt | None, notes: Sequence[str], *, explain: bool) -> str:
    """Return the answer of ``zeroplan time`` for a terminal."""
    job, gpu = answer.job, answer.job.cluster.gpu
    head = f"{model_words(job)} on {job.mesh.world_size:,} x {'' if gpu is None else gpu.full_name}: {layout_words(job)}"
    learnt_lines = [] if learnt is None else textwrap.wrap(learnt_words(learnt), WIDTH)
    reasons = list(step_reasons(time)) if explain else []
    return paragraphs(
        [textwrap.wrap(head, WIDTH), list(step_lines(time, job.mesh.world_size)), reasons, learnt_lines,
         textwrap.wrap(verdict_sentence(answer), WIDTH), notes_part(notes)]
    )  # fmt: skip


def learnt_words(learnt: Learnt) -> str:
    """Return the rates learnt from a measured run, and the jobs to which they apply."""
    factor = f"Computing runs at {learnt.factor:.2f} of the usual rates here; the rates of the links do not change."
    said = f"A step was measured at {learnt.measured_s:,.3f} s and estimated at {learnt.estimated_s:,.3f} s."
    if learnt.carried == 1:
        return f"{said} {factor} Other jobs share a part of this deviation: `zeroplan plan --measured` prints how much."
    return f"{said} Other layouts are expected to share {learnt.carried:.0%} of this deviation, by published runs. {factor}"


def step_payload(answer: Estimate, time: StepTime, learnt: Learnt | None, notes: Sequence[str]) -> dict[str, object]:
    """Return the answer of ``zeroplan time`` as plain data. [s, bytes]"""
    return {
        "schema_version": SCHEMA_VERSION,
        "layout": layout_words(answer.job),
        "fits": answer.fits,
        "least_bytes": answer.least_bytes,
        "step_s": float(time.seconds),
        "tokens_per_s_per_gpu": float(time.tokens_per_s),
        "mfu": float(time.mfu),
        "parts": [part_payload(one) for one in time.parts],
        "measured": None if learnt is None else {
            "step_s": learnt.measured_s, "estimated_s": learnt.estimated_s, "factor": learnt.factor,
            "carried": learnt.carried,
        },
        "notes": list(notes),
    }  # fmt: skip


def step_lines(time: StepTime, gpus: int) -> Iterator[str]:
    """Yield a table of the step's parts, and the rate. [s, tokens/s]"""
    whole = float(time.seconds)
    yield f"{'Time of a step':<44}{'s':>10}{'':>8}{'hidden s':>10}"
    for part in time.parts:
        took, hidden = float(part.seconds), float(part.hidden_s)
        if took + hidden > 0:
            yield f"  {part.name:<42.42}{took:>10.3f}{took / whole:>7.1%} {hidden:>10.3f}"
    yield f"  {'together':<42}{whole:>10.3f}"
    yield rate_line(time, gpus)


def rate_line(time: StepTime, gpus: int) -> str:
    """Return tokens/s and MFU in words."""
    rate, mfu = float(time.tokens_per_s), float(time.mfu)
    return f"{rate:,.0f} tokens/s per GPU, {rate * gpus:,.0f} in all; MFU {mfu:.1%} (no recomputation, causal attention)"


def step_reasons(time: StepTime) -> Iterator[str]:
    """Yield how each part was computed, and its source."""
    yield "How each part is computed"
    for part in time.parts:
        if float(part.seconds) + float(part.hidden_s) > 0:
            yield f"  {part.name}: {part.reason}"
            yield f"      {part.source}"


def part_payload(one: Part) -> dict[str, object]:
    """Return a part as plain data. [s]"""
    return {"part": one.name, "seconds": float(one.seconds), "hidden_s": float(one.hidden_s), "reason": one.reason,
            "source": one.source}  # fmt: skip
