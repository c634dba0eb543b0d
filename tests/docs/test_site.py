"""On the site every page is in the navigation and every link has a target; the site builds without warnings and loads nothing."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import yaml

import zeroplan
from tests.docs.generated.commands import paths
from tests.docs.generated.words import meant
from tests.docs.links import anchors, links
from tests.docs.pages import PAGES, README, ROOT, name_of, text_of

DOCS = ROOT / "docs"
SAID = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))


def in_nav(entries: list) -> Iterator[str]:
    for entry in entries:
        for value in entry.values() if isinstance(entry, dict) else (entry,):
            yield from in_nav(value) if isinstance(value, list) else (value,)


def test_every_page_is_in_the_navigation_once():
    listed, there = sorted(in_nav(SAID["nav"])), {page.relative_to(DOCS).as_posix() for page in PAGES if page != README}
    assert not there - set(listed), "a page needs its line in the nav of mkdocs.yml"
    assert listed == sorted(there)


def test_every_how_to_is_in_the_list_of_questions():
    listed = {file for file, _ in links(DOCS / "how-to" / "index.md")}
    assert {page.name for page in (DOCS / "how-to").glob("*.md")} - {"index.md"} <= listed


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_link_has_a_target(page: Path):
    for file, anchor in links(page):
        target = (page.parent / file).resolve() if file else page
        assert target.exists(), f"{name_of(page)} links to {file}"
        assert page == README or target.is_relative_to(DOCS), f"{name_of(page)} links to {file}, which the site does not have"
        assert not anchor or target.suffix == ".png" or anchor in anchors(target), f"{name_of(page)} links to {file}#{anchor}"


def test_every_public_name_is_in_the_api():
    documented = re.findall(r"^::: zeroplan\.(\w+)$", text_of(DOCS / "api.md"), re.MULTILINE)
    assert sorted(documented) == sorted(zeroplan.__all__)


def test_every_field_of_a_public_class_is_documented():
    for name in zeroplan.__all__:
        kind = getattr(zeroplan, name)
        names = {one.name for one in fields(kind)} if is_dataclass(kind) else set(getattr(kind, "_fields", ()))
        assert not names or not names - meant(kind).keys(), name


def test_every_command_is_on_the_page_of_the_command_line():
    headings = re.findall(r"^##+ zeroplan (.*)$", text_of(DOCS / "cli.md"), re.MULTILINE)
    assert headings == paths()


@pytest.mark.skipif(find_spec("material") is None, reason="needs mkdocs-material (the extra docs)")
@pytest.mark.skipif(find_spec("mkdocstrings") is None, reason="needs mkdocstrings (the extra docs)")
def test_the_site_builds_without_a_warning_and_names_no_other_host(tmp_path: Path):
    built = subprocess.run(  # not --quiet: --strict counts only warnings that are logged
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, check=False, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip
    assert built.returncode == 0, built.stdout + built.stderr
    pages = list(tmp_path.rglob("*.html"))
    # All pages but the README, and two more: the page for missing addresses, and the snapshot of the calculator.
    assert len(pages) == len(PAGES) + 1
    for page in pages:
        loaded = re.findall(r"<(?:script|img|iframe|link)\b[^>]*?(?:src|href)=\"?(https?:[^\"\s>]+)", text_of(page))
        assert not loaded, f"{page.name} loads {loaded}"


@pytest.mark.skipif(find_spec("mkdocs") is None, reason="needs mkdocs (the extra docs)")
@pytest.mark.parametrize("command", [
    "zeroplan estimate --params 7e9 --gpus 8 --stage 3 --explain",
    "zeroplan estimate --model llama-3.1-8b --lora-rank 16 --gpu a100 --seq-len 2048",
])  # fmt: skip
def test_a_commands_link_opens_the_calculator_with_its_job(command: str):
    from tests.explore.test_answers import printed
    from zeroplan.explore.answers import answer_payload

    spec = spec_from_file_location("snapshot", DOCS / "assets" / "snapshot.py")
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(hook := module_from_spec(spec))
    shown = json.loads(json.dumps(answer_payload(hook._controls_of(command))["estimate"]))
    told = printed(command)
    assert {**shown, "notes": [], "changes": []} == {**told, "notes": [], "changes": []}  # type: ignore[dict-item]
