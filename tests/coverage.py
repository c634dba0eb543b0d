"""Which lines and branches does no test reach? ``python -m tests.coverage`` runs the suite under coverage and prints them.

Exits with 1 if tests reach less than all of the pure core (the layers below ``report``), or less than 95 % of the package.
Failing tests are printed but do not change the exit code: the suite has its own command.
Needs ``pip install coverage`` (7.10 or later); the suite takes about three times as long.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

#: Required share of lines and branches of the whole package; of the core all are required.
LEAST_SHARE = 0.95


class Counts(NamedTuple):
    """The number of lines and branches in some files, and of those that no test reaches."""

    lines: int = 0
    missing_lines: int = 0
    branches: int = 0
    missing_branches: int = 0

    def and_of(self, summary: dict[str, int]) -> Counts:
        """The counts plus those of one more file in coverage's report."""
        return Counts(
            self.lines + summary["num_statements"],
            self.missing_lines + summary["missing_lines"],
            self.branches + summary["num_branches"],
            self.missing_branches + summary["missing_branches"],
        )

    @property
    def reached(self) -> float:
        """The reached share of lines and branches together.

        >>> Counts(lines=6, missing_lines=1, branches=4, missing_branches=0).reached
        0.9
        """
        return 1 - (self.missing_lines + self.missing_branches) / max(1, self.lines + self.branches)


def core() -> set[str]:
    """The names of the modules below ``report`` in the import contract."""
    contracts = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]["contracts"]
    layers = next(one["layers"] for one in contracts if "report" in one.get("layers", ()))
    return {name.strip(" ()") for layer in layers[layers.index("report") + 1 :] for name in layer.split("|")}


def part_of(path: str) -> str:
    """The part of the package to which a file belongs.

    >>> part_of("zeroplan/engines/ddp/step.py"), part_of("zeroplan/resolve.py")
    ('engines', 'resolve')
    """
    return Path(path).parts[1].removesuffix(".py")


def run_suite(folder: Path, pytest_arguments: list[str]) -> None:
    """Run the tests under coverage; every process writes its data file into the folder."""
    environment = os.environ | {"COVERAGE_FILE": str(folder / ".coverage")}
    command = [sys.executable, "-m", "coverage", "run", "-m", "pytest", "-q", *pytest_arguments]
    subprocess.run(command, env=environment, check=False)


def report(data: list[Path], folder: Path) -> dict[str, Any]:
    """Coverage's report by source file, from these data files or folders of data files."""
    together, made = folder / "together" / ".coverage", folder / "coverage.json"
    together.parent.mkdir()
    coverage = [sys.executable, "-m", "coverage"]
    subprocess.run([*coverage, "combine", "--quiet", "--keep", "--data-file", together, *data], check=True)
    subprocess.run([*coverage, "json", "--quiet", "--data-file", together, "-o", made], check=True)
    files: dict[str, Any] = json.loads(made.read_text(encoding="utf-8"))["files"]
    return files


def missing(path: str, file: dict[str, Any]) -> list[str]:
    """One line of text for each line and branch of a file that no test reaches."""
    lines = set(file["missing_lines"])
    said = [(line, f"{path}:{line} is not reached") for line in lines]
    for start, end in file["missing_branches"]:
        if start not in lines and end not in lines:
            said.append((start, f"{path}:{start} never goes to {f'line {end}' if end > 0 else 'its end'}"))
    return [text for _, text in sorted(said)]


def judged(files: dict[str, Any]) -> bool:
    """Print the table and the core's missing lines; return whether both goals are met."""
    of_core, counts = core(), {"the core": Counts(), "the package": Counts()}
    for path, file in sorted(files.items()):
        part = part_of(path)
        for name in (part, "the package", *(("the core",) if part in of_core else ())):
            counts[name] = counts.get(name, Counts()).and_of(file["summary"])
        if part in of_core:
            print(*missing(path, file), sep="\n", end="\n" if missing(path, file) else "")
    for name, one in counts.items():
        print(
            f"{name:<14}{'core' if name in of_core else '':<6}{one.lines:>7,} lines, {one.missing_lines:>4} not reached,"
            f"{one.branches:>7,} branches, {one.missing_branches:>4} not reached: {one.reached:8.2%}"
        )
    return counts["the core"].reached == 1 and counts["the package"].reached >= LEAST_SHARE


def main() -> None:
    """Run the suite unless data is given, print the report, and exit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, nargs="+", help="files of data, or folders of them, instead of running the suite")
    parser.add_argument("--only", nargs=argparse.REMAINDER, default=["-n", "2"], help="arguments of pytest, instead of -n 2")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if asked.data is None:
            run_suite(Path(folder), asked.only)
        met = judged(report(asked.data or [Path(folder)], Path(folder)))
    sys.exit(0 if met else 1)


if __name__ == "__main__":
    main()
