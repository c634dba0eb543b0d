"""The page in the browser as one file of the site, for one job under every stage. It needs no server."""

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig

from zeroplan.explore.report import report_html
from zeroplan.resolve import Request, resolve

_ASKED = Request(model="llama-3.1-8b", gpu="h100-sxm-80gb", gpus=8, stage=0, seq_len=4096, recompute="selective")
_COMMAND = "zeroplan estimate --model llama-3.1-8b --gpu h100-sxm-80gb --gpus 8 --stage 0 --seq-len 4096 --recompute selective"


def on_post_build(config: MkDocsConfig) -> None:
    """Write the page beside the others."""
    path = Path(config.site_dir) / "snapshot.html"
    path.write_text(report_html(resolve(_ASKED), _COMMAND), encoding="utf-8")
