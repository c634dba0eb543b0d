"""The files and functions that architecture.md and contributing.md name exist, and architecture.md is short."""

import re
from pathlib import PurePosixPath

from tests.docs.pages import ROOT, text_of

PAGE = text_of(ROOT / "docs" / "architecture.md")
DETAILS = text_of(ROOT / "docs" / "contributing.md")
FILES = [file.relative_to(ROOT) for folder in ("zeroplan", "tests") for file in (ROOT / folder).rglob("*.py")]


def test_every_named_file_exists():
    named = re.findall(r"`([\w/]+\.py)`", PAGE + DETAILS)
    assert len(named) > 80
    assert not [name for name in named if not any(PurePosixPath(file).match(name) for file in FILES)]


def test_every_package_is_named_on_the_architecture_page():
    named = re.findall(r"`(?:zeroplan/)?(\w+)/`", PAGE)
    packages = {file.parent.name for file in (ROOT / "zeroplan").glob("*/__init__.py")}
    assert not packages - set(named)


def test_the_page_fits_on_two_screens():
    lines = PAGE.splitlines()
    assert len(lines) <= 100
    assert max(map(len, lines)) <= 120


def test_the_functions_of_the_example_exist():
    stations = re.findall(r"`((?:zeroplan|tests)/[\w/]+\.py)`,\s+`(\w+)`", PAGE)
    assert len(stations) == 9
    for file, name in stations:
        assert re.search(rf"^(?:def {name}\(|{name} = )", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE), (file, name)
    plan = (ROOT / "zeroplan" / "engines" / "fsdp2" / "plan.py").read_text(encoding="utf-8")
    assert "this rank's chunk of" in plan


def test_every_path_of_the_walk_throughs_exists():
    walks = re.split(r"^## ", DETAILS, flags=re.MULTILINE)
    asked = ("A model", "A GPU", "An optimizer", "An engine's release", "A record from your cluster", "A release")
    found = {title: next(walk for walk in walks if walk.startswith(f"{title}\n")) for title in asked}
    for title, walk in found.items():
        named = re.findall(r"`((?:zeroplan|tests|docs|\.github|\.ci)/[\w./-]*|\w[\w.-]*\.(?:md|toml|txt))`", walk)
        assert len(set(named)) >= 2, title
        assert not [path for path in named if not (ROOT / path).exists()], title


def test_every_name_of_the_walk_throughs_is_in_its_file():
    for file, names in {
        "zeroplan/spec/recipe.py": ("Optimizer", "STEPS_ALONE", "Fsdp2Options", "DeepSpeedOptions", "MegatronOptions"),
        "zeroplan/engines/optimizers.py": ("_STEPS",),
        "zeroplan/engines/published_optimizers.py": ("PUBLISHED",),
        "zeroplan/engines/fsdp2/plan.py": ("of_torch_2_15",),
        "zeroplan/spec/releases.py": ("Release",),
    }.items():
        written = (ROOT / file).read_text(encoding="utf-8")
        for name in names:
            assert f"`{name}" in DETAILS, name
            assert re.search(rf"^ *(?:class {name}\(|def {name}\(|{name}(?:: | = ))", written, re.MULTILINE), (file, name)
