"""Which small wrong edits of the model does no test notice? ``python -m tests.mutation --sample 600`` tries a random sample.

mutmut writes the edits (a number more, another operator, an argument left out, another word) of all undecorated functions in
``zeroplan/transformer``, ``zeroplan/engines``, ``traffic`` and ``timeline``. Each edit is tried in its own process: first the
saved jobs (``tests/answers``) that call the function are estimated again; if no answer moves, the tests without torch run.
Edits that survive both are printed as a diff.
Needs ``pip install mutmut``; a sample of 600 takes about an hour.
"""

from __future__ import annotations

import argparse
import difflib
import importlib.abc
import importlib.util
import inspect
import os
import random
import signal
import sys
import tempfile
from collections import Counter, defaultdict
from functools import wraps
from hashlib import blake2s
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from importlib.machinery import ModuleSpec
    from types import ModuleType

PACKAGES = ("zeroplan.transformer", "zeroplan.engines", "zeroplan.traffic", "zeroplan.timeline")
TESTS = (
    "tests/test_traffic.py",
    "tests/test_timeline.py",
    "tests/test_estimator.py",
    "tests/golden",
    "tests/transformer",
    "tests/engines",
)
FOLDER = Path(tempfile.gettempdir()) / "zeroplan-mutants"
ORIGINAL = "_mutmut_orig"
#: An edit counts as noticed if the jobs, or the tests, take longer than this. [s]
PATIENCE, SUITE_PATIENCE = 60, 900


class Mutated(NamedTuple):
    """A function with its edits by name, the edit that runs, and the jobs that call it."""

    module: str
    variants: dict[str, Callable[..., Any]]
    running: list[Callable[..., Any] | None]
    calls: set[int]


FUNCTIONS: list[Mutated] = []
#: The job being estimated while calls are recorded.
CURRENT: list[int] = []


def switchable(variants: dict[str, Callable[..., Any]], *, is_classmethod: bool = False) -> Callable[..., Any]:
    """Replace mutmut's trampoline: read the running edit from a list instead of the process's environment."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        one = Mutated(function.__module__, variants, [None], set())
        FUNCTIONS.append(one)

        @wraps(function)
        def call(*args: object, **named: object) -> object:
            if CURRENT:
                one.calls.add(CURRENT[0])
            return (one.running[0] or function)(*args, **named)

        return classmethod(call) if is_classmethod else call  # type: ignore[return-value]

    return decorate


class Importer(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Loads modules of the mutated packages with all their edits."""

    def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:
        """The spec of a mutated module; None for all others."""
        if not any(name == one or name.startswith(f"{one}.") for one in PACKAGES):
            return None
        sys.meta_path.remove(self)
        found = importlib.util.find_spec(name)
        sys.meta_path.insert(0, self)
        if found is None or found.origin is None:
            return None
        return importlib.util.spec_from_file_location(
            name, found.origin, loader=self, submodule_search_locations=found.submodule_search_locations
        )

    def create_module(self, spec: ModuleSpec) -> None:
        """Return None: Python creates the module."""

    def exec_module(self, module: ModuleType) -> None:
        """Run the mutated source."""
        path = mutated_source(Path(str(module.__file__)))
        exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), module.__dict__)  # noqa: S102


def mutated_source(path: Path) -> Path:
    """The file with all edits of a source, written once for each version of the source."""
    from mutmut.mutation.file_mutation import mutate_file_contents

    text = path.read_text(encoding="utf-8")
    kept = FOLDER / f"{path.stem}-{blake2s(text.encode(), digest_size=8).hexdigest()}.py"
    if not kept.exists():
        FOLDER.mkdir(exist_ok=True)
        kept.write_text(mutate_file_contents(str(path), text).code, encoding="utf-8")
    return kept


def mutants() -> Iterator[tuple[Mutated, str]]:
    """Every edit of every imported function."""
    for one in FUNCTIONS:
        for name in one.variants:
            if name != ORIGINAL:
                yield one, name


def load() -> tuple[list[Any], dict[str, Any]]:
    """Import all mutated modules; return the saved jobs and their stored answers."""
    from mutmut.mutation import trampoline

    trampoline.wrap_in_trampoline = switchable
    sys.meta_path.insert(0, Importer())
    from tests.answers import jobs, snapshot

    for package in PACKAGES:
        for path in sorted(Path(package.replace(".", "/")).rglob("*.py")):
            importlib.import_module(".".join(path.with_suffix("").parts).removesuffix(".__init__"))
    return list(jobs.kept()), {one.job: one for one in snapshot.stored()}


def find_calls(jobs: list[Any]) -> None:
    """Record for every function which jobs call it; empties all caches before each job."""
    from zeroplan import estimate

    for number, kept in enumerate(jobs):
        forget()
        CURRENT[:] = [number]
        estimate(kept.job).reserved  # noqa: B018
    CURRENT.clear()
    forget()


def forget() -> None:
    """Empty every cache of the package."""
    for name, module in list(sys.modules.items()):
        if name.startswith("zeroplan"):
            for value in vars(module).values():
                getattr(value, "cache_clear", lambda: None)()


def outcome(one: Mutated, name: str, jobs: list[Any], stored: dict[str, Any]) -> str:
    """``answers`` or ``tests``, whichever notices the edit first, else ``survived``."""
    if _in_a_child(lambda: _moves(one, name, jobs, stored), PATIENCE):
        return "answers"
    return "tests" if _in_a_child(lambda: _fails(one, name), SUITE_PATIENCE) else "survived"


def _moves(one: Mutated, name: str, jobs: list[Any], stored: dict[str, Any]) -> bool:
    from tests.answers import snapshot
    from zeroplan import estimate

    one.running[0] = one.variants[name]
    asked = (jobs[number] for number in sorted(one.calls))
    return any(snapshot.answer(kept.words, estimate(kept.job)) != stored[kept.words] for kept in asked)


def _fails(one: Mutated, name: str) -> bool:
    import pytest

    one.running[0] = one.variants[name]
    return pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-m", "not torch and not deepspeed", *TESTS]) != 0


def _in_a_child(noticed: Callable[[], bool], patience: int) -> bool:
    """Whether a fork notices the edit: by ``noticed``, an error or the time limit."""
    child = os.fork()
    if child == 0:
        sys.stdout = sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115, PTH123
        signal.alarm(patience)
        try:
            os._exit(int(noticed()))
        except BaseException:  # noqa: BLE001  an edit may raise whatever it likes
            os._exit(1)
    return os.waitpid(child, 0)[1] != 0


def difference(one: Mutated, name: str) -> str:
    """The edit as a diff."""
    before, after = (inspect.getsource(one.variants[key]).splitlines() for key in (ORIGINAL, name))
    changed = [line for line in difflib.unified_diff(before, after, lineterm="", n=0) if line[:1] in "+-"]
    return "\n".join(line for line in changed if not line.startswith(("---", "+++", "-def ", "+def ")))


def main() -> None:
    """Draw edits, try them, and print survivors and totals."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sample", type=int, default=600)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="modules whose name begins with this")
    asked = parser.parse_args()
    jobs, stored = load()
    every = [(one, name) for one, name in mutants() if one.module.startswith(asked.only or "zeroplan")]
    drawn = random.Random(asked.seed).sample(every, min(asked.sample, len(every)))
    find_calls(jobs)
    if _in_a_child(lambda: _fails(drawn[0][0], ORIGINAL), SUITE_PATIENCE):
        sys.exit("the tests fail without an edit; mend them first")
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for one, name in drawn:
        result = outcome(one, name, jobs, stored)
        found[".".join(one.module.split(".")[1:3])][result] += 1
        if result == "survived":
            print(f"{one.module} {name}\n{difference(one, name)}", flush=True)
    for part, counts in sorted(found.items()):
        print(f"{part}: {dict(counts)}")
    total: Counter[str] = sum(found.values(), Counter())
    print(f"{1 - total['survived'] / total.total():.1%} of {total.total()} noticed, drawn from {len(every):,}: {dict(total)}")


if __name__ == "__main__":
    main()
