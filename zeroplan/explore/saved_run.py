"""The page of a saved dry run: pictures, the answer, and every line of code and module at the peak. No external resources."""

import base64
import io
from html import escape

from zeroplan.installation import not_installed
from zeroplan.report.dryrun import dry_run_text
from zeroplan.script_trace import SavedRun


def run_page(saved: SavedRun) -> bytes:
    """Return the page as HTML. Without matplotlib, or for a run without blocks, it has no pictures."""
    title = escape(f"Dry run of {saved.run.command[0]}")
    pictures = "" if saved.trace is None or not_installed("matplotlib", by="drawing") else _pictures(saved)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="stylesheet" href="/page.css"></head>\n'
        f'<body class="run"><main><h1>{title}</h1>\n{pictures}'
        f"<pre>{escape(dry_run_text(saved.run, verbose=True))}</pre>\n"
        f'<p><a href="/">Change a job and see its memory</a></p></main></body></html>\n'
    ).encode()


def _pictures(saved: SavedRun) -> str:
    from zeroplan.report.palette import THEMES  # noqa: PLC0415  only a picture pays for matplotlib
    from zeroplan.report.plots import frame  # noqa: PLC0415
    from zeroplan.report.plots.run import draw_run  # noqa: PLC0415
    from zeroplan.report.series.run import run  # noqa: PLC0415

    made = []
    for whole, name in ((False, "the last step"), (True, "the whole run")):
        theme, drawn = THEMES["light"], io.BytesIO()
        with frame.style(theme):
            figure = frame.blank()
            draw_run(figure, run(saved, whole=whole), theme)
            frame.saved(figure, drawn, "png")
        data = base64.b64encode(drawn.getvalue()).decode()
        made.append(f'<img class="wide" alt="Memory over {name}, by kind" src="data:image/png;base64,{data}">\n')
    return "".join(made)
