"""What every test shares."""

import gc
import os
import sys
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from tests.combined import CASES_WITHOUT_A_TEST, every_case, leave_to_the_night, waits_whole, without_a_test
from zeroplan import auto_profile
from zeroplan.verify.watching.cycles import manual_garbage_collection

# Where the environment forbids Python to keep what it compiles, each of the hundreds of processes that tests start compiles all
# that it imports. An installed program is compiled once.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Compare pictures with their references in every run, where pytest-mpl is installed, which does it when asked only."""
    if hasattr(config.option, "mpl"):
        config.option.mpl = True
        config.option.mpl_results_path = config.option.mpl_results_path or str(config.rootpath / ".pytest_cache" / "pictures")
    if config.pluginmanager.has_plugin("hypothesispytest"):
        from hypothesis import settings

        settings.register_profile("the same cases", derandomize=True)  # others are drawn by tests/properties/nightly.py
        settings.load_profile("the same cases")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the cases that run only at night, and note the named cases that no test has.

    Thousands of skipped tests take half a minute. In a run of everything they are left out; elsewhere they are skipped, with why.
    """
    waiting = leave_to_the_night(items)
    config.stash[CASES_WITHOUT_A_TEST] = without_a_test(items)
    if not every_case() and _is_of_everything(config):
        left_out = set(waiting)
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=waiting)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out files that wait for the night as a whole, of a run of everything."""
    return True if _is_of_everything(config) and waits_whole(collection_path) else None


def _is_of_everything(config: pytest.Config) -> bool:
    return config.args_source is pytest.Config.ArgsSource.TESTPATHS


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Fail for a file of tests that cannot be imported, which ``--doctest-ignore-import-errors`` would leave out in silence."""
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
    """Each run collects garbage several times: what was there before a file of runs, torch and all, is gone through once."""
    if request.node.get_closest_marker("torch") is None:
        yield
    else:
        with manual_garbage_collection():
            yield


@pytest.fixture(autouse=True)
def _a_test_leaves_no_garbage() -> Iterator[None]:
    """Models in reference cycles, of which a file of runs makes hundreds."""
    yield
    if not gc.isenabled():
        gc.collect()
        gc.freeze()  # what it has imported is gone through once, too; the file's end takes this back


@pytest.fixture(autouse=True)
def _no_model_is_traced_unasked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A configuration without formulas is refused, as without torch, but where its trace is what is tested: it takes seconds."""
    if request.path.stem != "test_auto_profile":
        monkeypatch.setattr(auto_profile, "not_installed", lambda *_, **__: "torch is not asked for by this test")


def pytest_runtest_teardown() -> None:
    """No test makes its own process believe in CUDA: everything after it would run on a GPU that is not there."""
    cpp = sys.modules.get("zeroplan.verify.fake_cuda.cpp")
    if cpp is not None and cpp._KEPT:
        pytest.fail("a test before made this process believe in CUDA; run that by tests/simulated.py", pytrace=False)
