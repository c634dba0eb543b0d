"""The files and functions that the page on architecture names are there."""

import re
from pathlib import PurePosixPath

from tests.docs.pages import ROOT, text_of

PAGE = text_of(ROOT / "docs" / "architecture.md")
FILES = [file.relative_to(ROOT) for folder in ("zeroplan", "tests") for file in (ROOT / folder).rglob("*.py")]


def test_every_file_is_there():
    named = re.findall(r"`([\w/]+\.py)`", PAGE)
    assert len(named) > 80
    assert not [name for name in named if not any(PurePosixPath(file).match(name) for file in FILES)]


def test_the_way_of_one_number_is_the_way_it_takes():
    stations = re.findall(r"`((?:zeroplan|tests)/[\w/]+\.py)`,\s+`(\w+)`", PAGE)
    assert len(stations) == 9
    for file, name in stations:
        assert re.search(rf"^(?:def {name}\(|{name} = )", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE), (file, name)
    plan = (ROOT / "zeroplan" / "engines" / "fsdp2" / "plan.py").read_text(encoding="utf-8")
    assert "this rank's chunk of" in plan
