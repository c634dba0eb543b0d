"""Pages of the site that need no server: one job under every stage, and, where Pyodide is at hand, the whole calculator."""

import os
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig

from zeroplan.explore.report import report_html
from zeroplan.explore.site import write_site
from zeroplan.resolve import Request, resolve

_ASKED = Request(model="llama-3.1-8b", gpu="h100-sxm-80gb", gpus=8, stage=0, seq_len=4096, recompute="selective")
_COMMAND = "zeroplan estimate --model llama-3.1-8b --gpu h100-sxm-80gb --gpus 8 --stage 0 --seq-len 4096 --recompute selective"
_PLACE = "<!-- calculator -->"
_LINK = '**<a href="calculator/index.html">Open the calculator</a>** to enter your own job. It computes in your browser.'


def on_page_markdown(markdown: str, **_: object) -> str:
    """Link the calculator where this site has it."""
    return markdown.replace(_PLACE, _LINK) if _pyodide() else markdown


def on_post_build(config: MkDocsConfig) -> None:
    """Write the pages beside the others."""
    site = Path(config.site_dir)
    (site / "snapshot.html").write_text(report_html(resolve(_ASKED), _COMMAND), encoding="utf-8")
    if pyodide := _pyodide():
        write_site(site / "calculator", Path(pyodide), force=True)


def _pyodide() -> str | None:
    """Return the folder of Pyodide's unpacked npm package, if the environment names it."""
    return os.environ.get("ZEROPLAN_PYODIDE")
