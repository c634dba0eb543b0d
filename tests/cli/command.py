"""The command, run in this process."""

from collections.abc import Callable

import pytest

from zeroplan.cli.app import main

Run = Callable[..., tuple[int, str, str]]
"""Runs ``zeroplan`` with arguments, and returns its exit code, stdout and stderr."""


def running(printed: "pytest.CaptureFixture[str]", *always: str) -> Run:
    """The same with some arguments that are always there."""

    def run(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main([*always, *map(str, arguments)])
        out, err = printed.readouterr()
        return int(ended.value.code or 0), out, err

    return run
