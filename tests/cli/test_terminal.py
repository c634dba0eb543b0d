"""On a narrow terminal zeroplan wraps an answer between words; in a pipe, and for text to copy, lines stay whole."""

import pytest

from tests.cli.command import Run
from zeroplan.cli.terminal import fitted

ASKED = ("--params", "13b", "--gpus", "2", "--gpu", "a100", "--seq-len", "4096")


@pytest.mark.parametrize("asked", [("estimate", *ASKED, "-v"), ("estimate", *ASKED, "--explain"), ("advise", *ASKED)])
def test_wrapping_keeps_every_word_and_no_line_is_too_wide(run: Run, asked: tuple[str, ...]):
    whole = run(*asked)[1]
    assert max(map(len, whole.splitlines())) > 80
    narrow = fitted(whole, 80)
    assert narrow.split() == whole.split()
    wide = [line.lstrip() for line in narrow.splitlines() if len(line) > 80]
    assert all(line.startswith(("--", "= ", "source: ")) for line in wide)
    assert fitted(whole, 140) == whole


def test_a_sentence_on_several_lines_is_wrapped_as_one():
    whole = f"  - a note {'of many words ' * 6}and\n    then\n  - another\nand one"
    assert len(whole.splitlines()[0]) + len(" then") > 100
    assert fitted(whole, 60).splitlines() == [
        f"  - a note {'of many words ' * 3}of many".rstrip(), f"    words {'of many words ' * 2}and then", "  - another", "and one",
    ]  # fmt: skip


def test_only_output_to_a_terminal_is_wrapped(run: Run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "60")
    piped = run("estimate", *ASKED, "-v")[1]
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert max(map(len, run("estimate", *ASKED, "-v")[1].splitlines())) <= 60 < max(map(len, piped.splitlines()))


def test_an_answer_on_one_screen_is_wrapped_sentence_by_sentence(run: Run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    lines = run("estimate", *ASKED)[1].splitlines()
    assert max(map(len, lines)) <= 60
    job = next(at for at, line in enumerate(lines) if line.startswith("13,000,000,000"))
    assert all(len(line) > 40 for line in lines[job : job + 2]), lines  # not wrapped at 80, and then again at 60
