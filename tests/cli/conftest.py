"""Gives the tests ``run``, which runs ``zeroplan`` in the process of the test."""

import pytest

from tests.cli.command import Run, running


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    return running(capsys)
