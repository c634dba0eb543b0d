"""Writes the page as a folder for any web server. The reader's browser computes the answers, with this package in Pyodide.

Pyodide is CPython as WebAssembly (pyodide.org). Its files are copied beside the page, which loads nothing from elsewhere.
"""

import io
import json
import zipfile
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from urllib.parse import urlencode

from zeroplan import __version__
from zeroplan.errors import SpecError
from zeroplan.explore.controls import controls
from zeroplan.explore.questions import ANSWERS, OK, in_browser
from zeroplan.report.series.stages import STAGES
from zeroplan.whole import unwritten, write_all

PYODIDE = ("pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm", "pyodide-lock.json", "python_stdlib.zip")
"""The files of Pyodide's npm package that a page loads."""
_LEFT_OUT = ("agents", "cli", "dryrun", "hooks", "verify")
"""Packages that need torch or a command line, which a browser lacks."""
_POLICY = (
    "default-src 'none'; script-src 'self' 'wasm-unsafe-eval'; worker-src 'self'; connect-src 'self'; style-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'"
)
_HEAD, _BODY, _SHARED = '<meta charset="utf-8">', "<body>", "to share it on this machine."
"""Parts of the page that differ from those of the server."""


def write_site(folder: Path, pyodide: Path, *, force: bool) -> None:
    """Write the page, this package and Pyodide into ``folder``, about 15 MB; ``pyodide``: its unpacked npm package.

    Raises SpecError, one line, where ``pyodide`` lacks a file, or ``folder`` has one of these files and ``force`` is not given.
    """
    lacking = next((name for name in PYODIDE if not (pyodide / name).is_file()), None)
    if lacking is not None:
        raise SpecError(f"{str(pyodide)!r} has no {lacking}; unpack Pyodide: npm pack pyodide && tar xf pyodide-*.tgz")
    copied = {folder / "pyodide" / name: (pyodide / name).read_bytes() for name in PYODIDE}
    try:
        write_all({**{folder / name: content for name, content in _contents()}, **copied}, force=force)
    except OSError as error:
        raise unwritten(error) from None


def _contents() -> Iterator[tuple[str, bytes]]:
    page = files("zeroplan.explore") / "page"
    yield "index.html", _index((page / "index.html").read_text(encoding="utf-8")).encode()
    for name in ("page.css", "page.js", "worker.js"):
        yield name, (page / name).read_bytes()
    answers = list(_first_answers())
    yield "first.json", json.dumps(dict(answers[:2]), ensure_ascii=False).encode()
    yield "more.json", json.dumps(dict(answers[2:]), ensure_ascii=False).encode()
    yield f"zeroplan-{__version__}.zip", _package()


def _first_answers() -> Iterator[tuple[str, str]]:
    """Yield what the page asks first, and then under each ZeRO stage, with the answers: it shows them before Python starts."""
    yield "/api/controls", in_browser("/api/controls")[1]
    defaults = {control.name: control.default for control in controls() if control.default}
    for stage in sorted(STAGES, key=lambda one: str(one) != defaults["stage"]):
        for what in ANSWERS:
            address = f"/api/{what}?{urlencode({**defaults, 'stage': stage})}"
            status, content = in_browser(address)
            if status == OK:
                yield address, content


def _index(html: str) -> str:
    """Return the page with addresses relative to its folder, and a policy that keeps every request there."""
    parts = {
        'href="/page.css"': 'href="page.css"',
        'src="/page.js"': f'src="page.js" data-version="{__version__}"',
        _HEAD: f'{_HEAD}\n<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
        _SHARED: "to share it.",
        _BODY: '<body class="in-browser">',
    }
    for before, after in parts.items():
        html = html.replace(before, after)
    return html


def _package() -> bytes:
    """Return this package as a ZIP file; the same package gives the same bytes."""
    root, content = Path(str(files("zeroplan"))), io.BytesIO()
    kept = (path for path in sorted(root.rglob("*")) if path.is_file() and _is_kept(path.relative_to(root)))
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in kept:
            name = zipfile.ZipInfo(str(Path("zeroplan") / path.relative_to(root)))
            archive.writestr(name, path.read_bytes(), zipfile.ZIP_DEFLATED)
    return content.getvalue()


def _is_kept(path: Path) -> bool:
    return path.parts[0] not in _LEFT_OUT and "__pycache__" not in path.parts and path.suffix != ".pyc"
