"""Runs ``zeroplan`` in the process of the test."""

from collections.abc import Callable

import pytest

from zeroplan.cli.app import main

Run = Callable[..., tuple[int, str, str]]
"""Runs ``zeroplan`` with arguments, and returns its exit code, stdout and stderr."""


def running(printed: "pytest.CaptureFixture[str]", *always: str) -> Run:
    """Return a function that runs ``zeroplan`` with the arguments ``always`` and those of the call."""

    def run(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main([*always, *map(str, arguments)])
        out, err = printed.readouterr()
        return int(ended.value.code or 0), out, err

    return run
