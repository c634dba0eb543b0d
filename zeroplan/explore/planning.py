"""The planner's answer for the page; each layout has the values of the controls that show it."""

import shlex
from collections.abc import Mapping

from zeroplan.errors import SpecError
from zeroplan.explore.answers import DESCRIBE, flags, request_of
from zeroplan.explore.controls import controls
from zeroplan.export.accelerate import as_accelerate_has_it
from zeroplan.export.command import estimate_command
from zeroplan.export.files import TARGETS, Target, inexpressible_in
from zeroplan.planner.asking import Question, ask
from zeroplan.planner.objectives import OBJECTIVES
from zeroplan.planner.result import Layout, Plan
from zeroplan.report.plan import Beside, layout_payload, plan_payload
from zeroplan.report.series.pareto import pareto
from zeroplan.resolve import Request
from zeroplan.resolve.options import SWITCH
from zeroplan.spec.job import JobSpec
from zeroplan.units import parse_count

SCHEMA_VERSION = 1

#: The planner's own fields on the page, with label and flag.
ASKED = {
    "global_batch": ("Sequences of all GPUs per step", "--global-batch"), "objective": ("Best for", "--objective"),
    "file": ("To run from", "--emit"),
}  # fmt: skip
_OBJECTIVES = tuple(one for one in OBJECTIVES if one != "cost")
"""The cost objective also plans on fewer GPUs, which takes too long for a page."""
_MOST_GPUS = 4096


def planned_payload(fields: Mapping[str, str]) -> dict[str, object]:
    """Return the best layouts for the model, GPUs and sequence, as in ``zeroplan plan --json``.

    Each layout has the values of the controls that show it in full, and the reason why it is or is not the best.
    """
    request, question, target = (
        request_of({name: fields[name] for name in DESCRIBE if name in fields}),
        _question(fields),
        _target(fields),
    )
    if request.gpu is None:
        raise SpecError("a plan must fit a GPU, and none is chosen; choose one among the controls")
    request = as_accelerate_has_it(request) if target == "accelerate" else request
    if (request.gpus or 1) > _MOST_GPUS:
        raise SpecError(f"{request.gpus:,} GPUs are more than the page plans for, {_MOST_GPUS:,}; run `zeroplan plan` instead")
    plan = ask(request, question, inexpressible=inexpressible_in(target))
    best = "" if plan.best is None else estimate_command(plan.best.layout.job, request)
    return {
        "schema_version": SCHEMA_VERSION,
        "command": _command(fields),
        "plan": plan_payload(plan, Beside(best)),
        "layouts": _layouts(plan, request),
        "scatter": _scatter(plan, request),
    }


def _scatter(plan: Plan, request: Request) -> dict[str, object]:
    """Return all layouts as points of memory and speed, and the Pareto front with the values of the controls."""
    series = pareto(plan)
    spots = [(spot.needed_bytes, round(spot.tokens_per_s, 1), spot.engine, spot.verdict, spot.layouts) for spot in series.spots]
    front = [
        {"words": named.words, "needed_bytes": named.needed_bytes, "tokens_per_s": named.tokens_per_s, "said": fields}
        for named, fields in zip(series.front, (controls_of(one.job, request) for one in plan.front), strict=True)
    ]
    return {"spots": spots, "front": front, "capacity_bytes": series.capacity_bytes}


def _question(fields: Mapping[str, str]) -> Question:
    unknown = fields.keys() - {control.name for control in controls()} - ASKED.keys()
    if unknown:
        raise SpecError(f"the page has no control {min(unknown)!r}")
    batch, objective = fields.get("global_batch", "").strip(), fields.get("objective", "").strip()
    for one in _OBJECTIVES:
        if objective in ("", one):
            return Question(one, parse_count(batch, what=ASKED["global_batch"][0], examples="1024") if batch else None)
    raise SpecError(f"{ASKED['objective'][0]} {objective!r} is not offered; choose one of {', '.join(_OBJECTIVES)}")


def _target(fields: Mapping[str, str]) -> Target | None:
    text = fields.get("file", "").strip()
    for target in TARGETS:
        if text == target:
            return target
    if text:
        raise SpecError(f"{ASKED['file'][0]} {text!r} is not offered; choose one of {', '.join(TARGETS)}")
    return None


def _command(fields: Mapping[str, str]) -> str:
    words = [word for name, (_, flag) in ASKED.items() if (text := fields.get(name, "").strip()) for word in (flag, text)]
    described = flags({name: fields[name] for name in DESCRIBE if name in fields})
    return shlex.join(("zeroplan", "plan", *described, *words))


def _layouts(plan: Plan, request: Request) -> list[dict[str, object]]:
    best = [] if plan.best is None else [_layout(plan.best.layout, request, plan.best.binding)]
    return best + [_layout(rival.layout, request, rival.why_not) for rival in plan.rivals]


def _layout(layout: Layout, request: Request, why: str) -> dict[str, object]:
    return {**layout_payload(layout), "why": why, "said": controls_of(layout.job, request)}


#: Flags without a control that have the default's value.
_TAKEN_ANYWAY = (("--lora-targets", "all-linear"),)


def controls_of(job: JobSpec, request: Request) -> dict[str, str] | None:
    """Return the controls' values for a job; None if one of its flags has no control."""
    of_page, words = {control.name: control for control in controls()}, iter(shlex.split(estimate_command(job, request))[2:])
    values: dict[str, str] = {}
    for flag in words:
        name = "model" if flag == "--params" else flag.removeprefix("--").replace("-", "_")
        if name in of_page and of_page[name].choices == SWITCH:
            values[name] = "yes"
            continue
        value = next(words, "")
        if name in of_page and not value.startswith("--"):
            values[name] = f"{values[name]} {value}" if name in values else value
        elif (flag, value) not in _TAKEN_ANYWAY:
            return None
    return values
