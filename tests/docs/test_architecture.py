"""The files and functions that the page on architecture and that on contributing name exist, and the former is short."""

import re
from pathlib import PurePosixPath

from tests.docs.pages import ROOT, text_of

PAGE = text_of(ROOT / "docs" / "architecture.md")
DETAILS = text_of(ROOT / "docs" / "contributing.md")
FILES = [file.relative_to(ROOT) for folder in ("zeroplan", "tests") for file in (ROOT / folder).rglob("*.py")]


def test_every_file_is_there():
    named = re.findall(r"`([\w/]+\.py)`", PAGE + DETAILS)
    assert len(named) > 80
    assert not [name for name in named if not any(PurePosixPath(file).match(name) for file in FILES)]


def test_every_package_has_its_place_in_the_reading_order():
    named = re.findall(r"`(?:zeroplan/)?(\w+)/`", PAGE)
    packages = {file.parent.name for file in (ROOT / "zeroplan").glob("*/__init__.py")}
    assert not packages - set(named)


def test_the_page_fits_on_two_screens():
    lines = PAGE.splitlines()
    assert len(lines) <= 100
    assert max(map(len, lines)) <= 120


def test_the_way_of_one_number_is_the_way_it_takes():
    stations = re.findall(r"`((?:zeroplan|tests)/[\w/]+\.py)`,\s+`(\w+)`", PAGE)
    assert len(stations) == 9
    for file, name in stations:
        assert re.search(rf"^(?:def {name}\(|{name} = )", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE), (file, name)
    plan = (ROOT / "zeroplan" / "engines" / "fsdp2" / "plan.py").read_text(encoding="utf-8")
    assert "this rank's chunk of" in plan
