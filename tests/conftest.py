"""What has to be so before the first test runs."""

from importlib.util import find_spec

import pytest


def pytest_collection_finish(session: pytest.Session) -> None:
    """Make the pretended GPU known before autograd first goes backward: it counts devices then, once per process."""
    if find_spec("torch") is not None and any(item.get_closest_marker("torch") for item in session.items):
        from zeroplan.verify.card import install

        install()
