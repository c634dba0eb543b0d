"""The commands and snippets of the pages run, and their outputs, tables and pictures are up to date."""

import re
import shlex
from importlib.metadata import version
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import pytest

from tests.docs import pages
from tests.docs.generated import layers
from tests.docs.pages import (
    AGAIN,
    PAGES,
    README,
    ROOT,
    Shown,
    all_commands,
    blocks,
    excerpt,
    furnish,
    name_of,
    text_of,
    with_tables,
)
from tests.docs.pictures import THEMES, assert_as_kept, draw, drawn_by, pictured
from tests.simulated import command_there
from zeroplan.cli import CANNOT_RUN
from zeroplan.cli.app import main

PICTURED = pictured()
COMMANDS = [
    pytest.param(command, shown, id=command) for command, shown in all_commands().items() if command not in PICTURED or shown
]
SNIPPETS = [
    pytest.param(block, id=f"{name_of(page)} {at}") for page in PAGES for at, block in enumerate(blocks(page, "python"))
]


@pytest.fixture
def a_users_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    furnish(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _here(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(words)
    return int(ended.value.code or 0), *capsys.readouterr()


@pytest.mark.parametrize(("command", "shown"), COMMANDS)
@pytest.mark.usefixtures("a_users_folder")
def test_every_command_prints_what_its_page_shows(command: str, shown: list[Shown], capsys: pytest.CaptureFixture[str]):
    for flag, name in pairwise(words := shlex.split(command)[1:]):
        if flag == "--out":
            Path(name).unlink(missing_ok=True)  # furnish wrote it for the commands that read it
    code, answer, said = command_there(*words) if words[0] == "profile" else _here(words, capsys)
    if code == CANNOT_RUN and "is not installed" in said and not shown:
        pytest.skip(said)
    assert code in (0, 1), said
    for one in shown:
        assert excerpt(answer, one.sections) == one.text, f"{name_of(one.page)}; {AGAIN}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_no_output_is_empty(page: Path):
    assert "```text\n```" not in text_of(page)


def test_a_picture_has_one_command():
    names = [drawn_by(command) for command in PICTURED]
    assert sorted(set(names)) == sorted(names)


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("command", PICTURED)
@pytest.mark.usefixtures("a_users_folder")
def test_every_picture_of_a_page_is_what_its_command_draws(command: str, theme: str):
    drawn = draw(command, theme)
    assert_as_kept(Path(drawn))


@pytest.mark.parametrize("page", [page for page in PAGES if "<!-- generated: " in text_of(page)], ids=name_of)
def test_every_generated_table_is_up_to_date(page: Path):
    assert with_tables(page) == text_of(page), AGAIN


def test_the_drawing_of_the_layers_is_up_to_date():
    assert layers.FIGURE.read_text(encoding="utf-8") == layers.drawing(), AGAIN


@pytest.mark.parametrize("snippet", SNIPPETS)
def test_every_python_snippet_runs(snippet: str, capsys: pytest.CaptureFixture[str]):
    exec(compile(snippet, "<page>", "exec"), {})  # noqa: S102  our own pages
    assert capsys.readouterr().out


def test_no_page_installs_zeroplan_by_its_name():
    """No package index has zeroplan: its extras are installed from a clone."""
    pages = (*PAGES, *ROOT.glob("notebooks/*.ipynb"), ROOT / "CHANGELOG.md", *ROOT.glob("zeroplan/**/*.py"))
    by_name = re.compile(r"""pip install[^`\n]*\bzeroplan\[|pip install \S*\bzeroplan\b""")
    assert [path.name for path in pages if by_name.search(path.read_text(encoding="utf-8"))] == []
    assert by_name.search('pip install --upgrade "zeroplan[verify]"')


def test_the_readme_shows_the_output_of_its_first_command():
    text = text_of(README)
    assert text.index("<!-- first command -->") < text.index("<!-- prints -->")


def test_the_ci_script_finds_the_test_command():
    text = text_of(README)
    assert "<!-- test command -->\n```sh\n" in text
    assert "pytest" in text
    assert (ROOT / ".ci" / "run").exists()


def test_an_output_for_one_release_of_torch_is_tested_only_with_it(monkeypatch: pytest.MonkeyPatch):
    page = ROOT / "docs" / "verify.md"
    under = [one for shown in all_commands().values() for one in shown if one.page == page]
    monkeypatch.setattr(pages, "version", lambda _name: "1.0.0")
    others = [one for shown in all_commands().values() for one in shown if one.page == page]
    assert len(others) == 0 < text_of(page).count("<!-- prints under torch 2.13")
    assert len(under) == (find_spec("torch") is not None and version("torch").startswith("2.13."))
