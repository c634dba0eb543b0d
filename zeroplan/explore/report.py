"""One answer as one file: the page with its style, its script and its data, for a mail or a ticket."""

import json
from importlib.resources import files

from zeroplan.explore.answers import answer_of, changes_of, controls_payload, step_of
from zeroplan.resolve import Resolved

_FORM = '<form id="controls" aria-label="The job" autocomplete="off"></form>'
_STYLE, _SCRIPT = '<link rel="stylesheet" href="/page.css">', '<script src="/page.js"></script>'
_BODY = "<body>"
_LINK = "The address of this page holds the job: copy it to come back, or to show somebody on this machine."


def report_html(resolved: Resolved, command: str) -> str:
    """Return the page for one job as a single file, which loads nothing else.

    ``command``: the command line of the same answer.
    """
    told = {
        **{name: controls_payload()[name] for name in ("colours", "hatches")},
        "answer": answer_of(resolved, command),
        "changes": changes_of(resolved)["changes"],
        "step": step_of(resolved)["step"],
    }
    inside = json.dumps(told, ensure_ascii=False).replace("<", "\\u003c")
    script = f'<script type="application/json" id="told">{inside}</script>\n<script>{_page("page.js")}</script>'
    page = _page("index.html")
    parts = {
        _FORM: "",
        _STYLE: f"<style>{_page('page.css')}</style>",
        _SCRIPT: script,
        _LINK: "",
        _BODY: '<body class="report">',
    }
    for what, instead in parts.items():
        page = page.replace(what, instead)
    return page


def _page(name: str) -> str:
    return (files("zeroplan.explore") / "page" / name).read_text(encoding="utf-8")
