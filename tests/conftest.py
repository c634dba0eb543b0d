"""Hooks and fixtures of all tests: night cases, pictures, garbage collection."""

import gc
import os
import sys
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from tests.combined import CASES_WITHOUT_A_TEST, every_case, leave_to_the_night, waits_whole, without_a_test
from zeroplan import auto_profile
from zeroplan.verify.watching.cycles import manual_garbage_collection

# Tests start hundreds of processes. Without cached bytecode each of them would compile all modules that it imports.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Turn on pytest-mpl if it is installed, so that every run compares pictures with their references."""
    if hasattr(config.option, "mpl"):
        config.option.mpl = True
        config.option.mpl_results_path = config.option.mpl_results_path or str(config.rootpath / ".pytest_cache" / "pictures")
    if config.pluginmanager.has_plugin("hypothesispytest"):
        from hypothesis import settings

        settings.register_profile("the same cases", derandomize=True)  # tests/properties/nightly.py draws others
        settings.load_profile("the same cases")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip the cases that run only at night, and store the cases in ``by_day.toml`` that no test has.

    Thousands of skipped tests take half a minute, so a run of the whole suite deselects them instead.
    """
    waiting = leave_to_the_night(items)
    config.stash[CASES_WITHOUT_A_TEST] = without_a_test(items)
    if not every_case() and _is_of_everything(config):
        left_out = set(waiting)
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=waiting)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """In a run of the whole suite, ignore files whose tests all run at night."""
    return True if _is_of_everything(config) and waits_whole(collection_path) else None


def _is_of_everything(config: pytest.Config) -> bool:
    return config.args_source is pytest.Config.ArgsSource.TESTPATHS


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Fail for a test file that cannot be imported, which ``--doctest-ignore-import-errors`` would skip silently."""
    report = yield
    if (
        report.outcome == "skipped"
        and collector.path.name.startswith("test_")
        and "unable to import module" in str(report.longrepr)
    ):
        report.outcome, report.longrepr = "failed", f"{collector.path} cannot be imported"
    return report


@pytest.fixture(scope="module", autouse=True)
def _garbage_is_collected_when_told(request: pytest.FixtureRequest) -> Iterator[None]:
    """Collect garbage only on request in files that use torch; each collection skips objects from before the file."""
    if request.node.get_closest_marker("torch") is None:
        yield
    else:
        with manual_garbage_collection():
            yield


@pytest.fixture(autouse=True)
def _a_test_leaves_no_garbage() -> Iterator[None]:
    """Free models in reference cycles after each test; a file makes hundreds."""
    yield
    if not gc.isenabled():
        gc.collect()
        gc.freeze()  # later collections skip modules that the test imported; the file's end undoes this


@pytest.fixture(autouse=True)
def _no_model_is_traced_unasked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse to trace configurations without formulas, which takes seconds, except in the tests of tracing."""
    if request.path.stem != "test_auto_profile":
        monkeypatch.setattr(auto_profile, "not_installed", lambda *_, **__: "torch is not asked for by this test")


def pytest_runtest_teardown() -> None:
    """Fail if a test has faked CUDA in its own process: all later tests would run on the fake GPU."""
    cpp = sys.modules.get("zeroplan.verify.fake_cuda.cpp")
    if cpp is not None and cpp._KEPT:
        pytest.fail("a test before made this process believe in CUDA; run that by tests/simulated.py", pytrace=False)
