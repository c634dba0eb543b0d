"""Pages of the site that need no server: one job under every stage, and, where Pyodide is at hand, the whole calculator."""

import os
import re
from pathlib import Path
from urllib.parse import urlencode

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.pages import Page

from zeroplan.catalog.gpu import gpu
from zeroplan.errors import ZeroplanError
from zeroplan.explore.answers import resolved_of, with_flags
from zeroplan.explore.report import report_html
from zeroplan.explore.site import write_site
from zeroplan.resolve import Request, resolve

_ASKED = Request(model="llama-3.1-8b", gpu="h100-sxm-80gb", gpus=8, stage=0, seq_len=4096, recompute="selective")
_COMMAND = "zeroplan estimate --model llama-3.1-8b --gpu h100-sxm-80gb --gpus 8 --stage 0 --seq-len 4096 --recompute selective"
_ESTIMATE = re.compile(r"^```sh\n(zeroplan estimate [^\n]+)\n```\n", re.MULTILINE)
_PRINTED = re.compile(r" (--explain|--check|--verbose|-v)\b")
"""Flags that change what is printed, and not the job."""
_PLACE = "<!-- calculator -->"
_LINK = '**<a href="calculator/index.html">Open the calculator</a>** to enter your own job. It computes in your browser.'


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Link the calculator where this site has it: at its place, and below each command that its controls can express."""
    if not _pyodide():
        return markdown
    root = "../" * page.url.count("/")
    return _ESTIMATE.sub(lambda found: found[0] + _tried(found[1], root), markdown.replace(_PLACE, _LINK))


def _tried(command: str, root: str) -> str:
    try:
        said = _controls_of(command)
    except ZeroplanError:
        return ""
    return (
        f'\n<p class="try"><a href="{root}calculator/index.html#{urlencode(said)}">Change this job in the calculator</a></p>\n'
    )


def _controls_of(command: str) -> dict[str, str]:
    """Return the values of the page's controls for a command; raises ZeroplanError where they cannot express it."""
    said = with_flags({}, _PRINTED.sub("", command.removeprefix("zeroplan estimate ")).replace("--params ", "--model "))
    if said is None:
        raise ZeroplanError("a flag has no control")
    if "gpu" in said:
        said["gpu"] = gpu(said["gpu"]).name
    job = resolved_of(said).job
    return {**said, "gpus": str(job.mesh.world_size), "stage": str(job.recipe.zero_stage), "seq_len": str(job.batch.seq_len)}


def on_post_build(config: MkDocsConfig) -> None:
    """Write the pages beside the others."""
    site = Path(config.site_dir)
    (site / "snapshot.html").write_text(report_html(resolve(_ASKED), _COMMAND), encoding="utf-8")
    if pyodide := _pyodide():
        write_site(site / "calculator", Path(pyodide), force=True)


def _pyodide() -> str | None:
    """Return the folder of Pyodide's unpacked npm package, if the environment names it."""
    return os.environ.get("ZEROPLAN_PYODIDE")
