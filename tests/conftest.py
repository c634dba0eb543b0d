"""What every test shares."""

from collections.abc import Iterator

import pytest

from zeroplan.verify.cycles import collected_when_told


@pytest.fixture(scope="module", autouse=True)
def _garbage_is_collected_when_told(request: pytest.FixtureRequest) -> Iterator[None]:
    """Each run collects garbage several times: what was there before a file of runs, torch and all, is gone through once."""
    if request.node.get_closest_marker("torch") is None:
        yield
    else:
        with collected_when_told():
            yield
