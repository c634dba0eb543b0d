"""Fuzzes the readers of files, guided by coverage, with atheris: ``python -m tests.properties.guided --seconds 600``.

libFuzzer starts from valid files and chooses changes by the coverage of the readers' code. Each kind of file has its own process,
because libFuzzer ends it. An input that breaks a reader is saved as a file, whose name is printed; run the command with ``--kind
KIND FILE`` to repeat it. atheris has no wheels for some versions of Python. Without it the script only prints a message;
:mod:`tests.properties.invalid` does not need it.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory, gettempdir

#: The modules whose coverage guides the fuzzer: those that read files, and those that check the data.
READERS = (
    "zeroplan.catalog",
    "zeroplan.job_file",
    "zeroplan.records",
    "zeroplan.snapshots",
    "zeroplan.spec",
    "zeroplan.settings",
)
#: Limits for one file: time, memory and size. [s, MiB, bytes]
MOST_SECONDS, MOST_MIB, LONGEST = 30, 4096, 100_000
#: Valid files that each kind starts from.
SEEDS = 12


def fuzz(kind: str, arguments: list[str]) -> None:
    """Fuzz one kind of file until libFuzzer ends the process."""
    import atheris

    with atheris.instrument_imports(include=list(READERS)):
        import zeroplan.cli.estimate
        import zeroplan.records
        import zeroplan.snapshots.reading  # noqa: F401
    from tests.properties.folder import folder
    from tests.properties.invalid import KINDS, asked

    own = folder("guided")

    def one(content: bytes) -> None:
        name, _, command = KINDS[kind](Random(len(content)))  # noqa: S311  nothing secret is drawn
        path = own / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
        places = {"FILE": str(path), "FOLDER": str(own), "OUT": str(own / "answer.html")}
        asked([places.get(word, word) for word in command])

    atheris.Setup([sys.argv[0], *arguments], one)
    atheris.Fuzz()


def seeds(kind: str, corpus: Path) -> None:
    """Write the valid files that a kind starts from."""
    from tests.properties.invalid import KINDS, written

    for number in range(SEEDS):
        name, data, _ = KINDS[kind](Random(number))  # noqa: S311  nothing secret is drawn
        (corpus / str(number)).write_bytes(written(name, data))


def ask(kind: str, seconds: int) -> bool:
    """Fuzz one kind for some seconds in a new process; return whether nothing broke."""
    limits = [f"-max_total_time={seconds}", f"-timeout={MOST_SECONDS}", f"-rss_limit_mb={MOST_MIB}", f"-max_len={LONGEST}"]
    with TemporaryDirectory() as corpus:
        seeds(kind, Path(corpus))
        kept = f"-artifact_prefix={gettempdir()}/zeroplan-{kind}-"
        command = [sys.executable, "-m", "tests.properties.guided", "--kind", kind, "--", *limits, kept, corpus]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = done.stderr.splitlines() or [""]
    print(f"{kind}: {lines[-1] if done.returncode == 0 else done.stderr[-3000:]}", flush=True)  # noqa: T201
    return done.returncode == 0


def run(seconds: int) -> int:
    """Fuzz all kinds of files, with an equal share of the time; return the exit code."""
    if find_spec("atheris") is None:
        print("atheris is not installed: files are changed at random alone, not led by what readers run")  # noqa: T201
        return 0
    from tests.properties.invalid import KINDS

    held = [ask(kind, max(1, seconds // len(KINDS))) for kind in KINDS]
    return 0 if all(held) else 1


def main() -> int:
    """Read the command line, fuzz all kinds or one, and return the exit code."""
    reading = argparse.ArgumentParser(prog="python -m tests.properties.guided", description=__doc__)
    reading.add_argument("--seconds", type=int, default=600, help="altogether")
    reading.add_argument("--kind", help="this one alone, with libFuzzer's own flags after --")
    reading.add_argument("flags", nargs="*")
    told = reading.parse_args()
    if told.kind is None:
        return run(told.seconds)
    fuzz(told.kind, told.flags)
    return 0


if __name__ == "__main__":
    sys.exit(main())
