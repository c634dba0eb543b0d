"""Dry runs of many random scripts: `python -m tests.dryrun.nightly --cases 60`. Each must take its steps or end in one line."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.dryrun.random_scripts import random_script
from tests.dryrun.running import Run, dry_run


def fault(run: Run) -> str:
    """Return what is wrong with the end of a dry run, or an empty string.

    A dry run may take its steps, or end with exit code 4 and one line of zeroplan's, without frames of zeroplan's code before it.
    """
    if run.code == 0 and run.answer["ended"] == "steps taken":
        return ""
    if run.code == 4 and "zeroplan" not in "".join(run.errors.splitlines()[:-1]) and run.last_line.startswith("zeroplan: "):
        return ""
    return "\n".join(run.errors.splitlines()[-12:]) or f"exit code {run.code}"


def main() -> int:
    """Run the cases and print each result; return 1 if one has a fault."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=60)
    parser.add_argument("--first", type=int, default=0)
    given = parser.parse_args()
    faults = 0
    for seed in range(given.first, given.first + given.cases):
        script = random_script(seed)
        with TemporaryDirectory() as folder:
            (Path(folder) / "script.py").write_text(script.code)
            run = dry_run("--gpus", str(script.gpus), "--", "script.py", folder=Path(folder))
        wrong = fault(run)
        faults += bool(wrong)
        print(seed, *script.parts, "FAULT\n" + wrong if wrong else run.code or run.peak_bytes, flush=True)  # noqa: T201
    return int(faults > 0)


if __name__ == "__main__":
    sys.exit(main())
