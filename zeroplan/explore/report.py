"""Writes an answer as one HTML file with style, script and data, to attach to a mail or a ticket.

The file also contains the answers under the other ZeRO stages; its only control chooses the stage.
"""

import json
import shlex
from importlib.resources import files
from itertools import pairwise

from zeroplan.errors import SpecError
from zeroplan.explore.answers import answer_of, changes_of, controls_payload, step_of
from zeroplan.report.series.stages import STAGES, at_stage
from zeroplan.report.words import made
from zeroplan.resolve import Resolved
from zeroplan.spec.job import JobSpec

_STYLE, _SCRIPT = '<link rel="stylesheet" href="/page.css">', '<script src="/page.js"></script>'
_BODY = "<body>"
_LINK = "The address of this page contains the job: copy it to come back, or to share it on this machine."


def report_html(resolved: Resolved, command: str) -> str:
    """Return the page for one job as a single file without external resources.

    ``command``: the command line for the same answer.
    """
    texts = {
        **{name: controls_payload()[name] for name in ("colours", "hatches")},
        "made": f"Made by {made()}.",
        "own": resolved.job.recipe.zero_stage,
        "answers": _answers(resolved, command),
    }
    inside = json.dumps(texts, ensure_ascii=False).replace("<", "\\u003c")
    script = f'<script type="application/json" id="told">{inside}</script>\n<script>{_page("page.js")}</script>'
    page = _page("index.html")
    parts = {
        _STYLE: f"<style>{_page('page.css')}</style>",
        _SCRIPT: script,
        _LINK: "",
        _BODY: '<body class="report">',
    }
    for what, instead in parts.items():
        page = page.replace(what, instead)
    return page


def _answers(resolved: Resolved, command: str) -> dict[int, object]:
    """Return the answer, the step and the changes under every ZeRO stage that the job supports."""
    found: dict[int, object] = {}
    for stage in STAGES:
        try:
            one = resolved._replace(job=at_stage(resolved.job, stage))
            answer = answer_of(one, command if one.job is resolved.job else _command_at(command, one.job))
        except SpecError:
            continue
        found[stage] = {"answer": answer, "step": step_of(one)["step"], **changes_of(one)}
    return found


def _command_at(command: str, job: JobSpec) -> str:
    """Return the command with the stage and engine of this job.

    >>> from zeroplan import job
    >>> _command_at("zeroplan estimate --model gpt2 --stage 3 --gpus 2", job(model="gpt2", gpus=2, stage=0))
    'zeroplan estimate --model gpt2 --gpus 2 --stage 0 --engine ddp'
    """
    words = shlex.split(command)
    kept = [word for before, word in pairwise(["", *words]) if not {before, word} & {"--stage", "--engine"}]
    return shlex.join([*kept, "--stage", str(job.recipe.zero_stage), "--engine", job.recipe.engine])


def _page(name: str) -> str:
    return (files("zeroplan.explore") / "page" / name).read_text(encoding="utf-8")
