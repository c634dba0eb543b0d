"""Finds the links of the pages. Run as a script, it requests every external address, which needs the network."""

from __future__ import annotations

import re
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING
from urllib.error import HTTPError

from tests.docs.pages import PAGES, ROOT, name_of, text_of

if TYPE_CHECKING:
    from pathlib import Path

_FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#{1,6} (.*)$", re.MULTILINE)
_ADDRESS = re.compile(r"https?://[^\s\"'<>)\]`,;]+")
_PLACES = ("docs", "zeroplan/catalog", "tests/golden")
_SECONDS = 20


def links(page: Path) -> list[tuple[str, str]]:
    """Return the file and anchor of every link to a page of the project; the file is empty for a link within the page."""
    targets = [target for target in _LINK.findall(_prose(page)) if "://" not in target]
    return [(file, anchor) for file, _, anchor in (target.partition("#") for target in targets)]


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as the site and most Markdown viewers name them."""
    return {_anchor(heading) for heading in _HEADING.findall(_prose(page))}


def _anchor(heading: str) -> str:
    kept = re.sub(r"[^\w\s-]", "", heading.encode("ascii", "ignore").decode()).strip().lower()
    return re.sub(r"[-\s]+", "-", kept)


def _prose(page: Path) -> str:
    return _FENCED.sub("", text_of(page))


def external() -> dict[str, list[str]]:
    """Return every address on the pages and in the TOML files of sources, with the files that contain it."""
    files = [*PAGES, *(path for place in _PLACES for path in (ROOT / place).rglob("*.toml"))]
    found: dict[str, list[str]] = {}
    for file in files:
        for address in _ADDRESS.findall(text_of(file)):
            if "127.0.0.1" not in address:
                found.setdefault(address.rstrip("."), []).append(name_of(file))
    return found


def _answer(address: str) -> str:
    """Return the error of a request to an address, or an empty string."""
    asked = urllib.request.Request(address, headers={"User-Agent": "Mozilla/5.0"})  # noqa: S310  http and https only
    try:
        with urllib.request.urlopen(asked, timeout=_SECONDS):  # noqa: S310
            return ""
    except HTTPError as error:
        return str(error)
    except OSError as error:
        return f"no answer: {error}"


def probe() -> int:
    """Print the error of each broken address; return 1 if there is one."""
    found = external()
    with ThreadPoolExecutor(16) as pool:
        answers = dict(zip(found, pool.map(_answer, found), strict=True))
    wrong = {address: answer for address, answer in answers.items() if answer}
    for address, answer in wrong.items():
        print(f"{address}  {answer}  in {', '.join(sorted(set(found[address])))}")  # noqa: T201
    print(f"{len(found)} external links, {len(wrong)} of them without a good answer")  # noqa: T201
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(probe())
