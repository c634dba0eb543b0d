"""The command, run in this process."""

import pytest

from tests.cli.command import Run, running


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    return running(capsys)
