"""What every test shares."""

import gc

import pytest


@pytest.fixture(scope="module", autouse=True)
def _what_is_imported_is_no_garbage() -> None:
    """Runs collect garbage at every phase, and torch's, transformers' and pytest's own objects take long to go through."""
    gc.collect()
    gc.freeze()
