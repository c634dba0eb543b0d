"""Checks that the package is complete wherever it is installed: ``python -m tests.packaging.nightly``.

It takes minutes and needs the network. It builds the wheel and the source archive. It installs the wheel in an empty environment
of each Python that is here (3.11 to 3.14), with the newest libraries that the wheel admits, and for the oldest Python also with
the oldest. There it runs the program, and the tests of the source archive that need no torch. It lets pip resolve each extra
alone. It prints a table; the exit code is 1 if a check failed.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple
from zipfile import ZipFile

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT, BUILD = PYPROJECT["project"], PYPROJECT["build-system"]["requires"]
OLDEST_PYTHON = PROJECT["requires-python"].removeprefix(">=")
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
#: Extras whose oldest releases are installed too. The other extras bring torch.
LIGHT = ("plot", "web")
TESTS = ("tests/cli", "tests/spec", "tests/catalog", "tests/explore/test_server.py", "tests/report", "tests/test_estimator.py")
#: Packages for the tests, which the package itself does not need.
TOOLS = ("pytest", "hypothesis", "httpx", "pytest-mpl")
SAID = (
    ("--version",), ("doctor",), ("models",), ("gpus",), ("estimate", "--params", "7e9", "--gpus", "8", "--stage", "3"),
    ("estimate", "--help"), ("plan", "--model", "gpt2", "--gpu", "l4-24gb", "--gpus", "2", "--seq-len", "256"),
    ("plot", "stages", "--model", "gpt2", "--out", "stages.png"), ("explore", "--help"), ("verify", "--help"),
)  # fmt: skip
_TAIL = 12


class Row(NamedTuple):
    """One line of the table, with the end of the output if the check failed."""

    what: str
    fell: str


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all checks and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", action="append", help="a version, as 3.12, instead of all that are here; repeatable")
    parser.add_argument("--tests", nargs="*", default=TESTS, help="what to run in each environment")
    parser.add_argument("--without-extras", action="store_true", help="do not have pip resolve the extras")
    asked = parser.parse_args(arguments)
    rows = []
    with tempfile.TemporaryDirectory(prefix="packaging-") as folder:
        for row in rows_of(Path(folder), asked.python or PYTHONS, asked.tests, extras=not asked.without_extras):
            print(f"{'fell' if row.fell else 'ok  '}  {row.what}", *([row.fell] if row.fell else []), sep="\n", flush=True)
            rows.append(row)
    print(f"\n{len(rows)} checks, {sum(bool(row.fell) for row in rows)} fell")
    return int(any(row.fell for row in rows))


def rows_of(folder: Path, pythons: Sequence[str], tests: Sequence[str], *, extras: bool) -> Iterator[Row]:
    """Yield each check when it is done."""
    wheel, source = built(folder)
    yield Row("wheel and source are built", "")
    yield Row("the source builds the same wheel", differing(wheel, source, folder / "again"))
    with tarfile.open(source) as archive:
        archive.extractall(folder / "source", filter="data")
    (unpacked,) = (folder / "source").iterdir()
    shutil.rmtree(unpacked / "zeroplan")  # so that the tests can only find what is installed
    for version in pythons:
        python = interpreter(version)
        if python is None:
            yield Row(f"Python {version} is not here", "")
            continue
        # The oldest libraries were built for the oldest Python only.
        for age in ("newest", "oldest") if version == OLDEST_PYTHON else ("newest",):
            where = environment(folder / f"{version}-{age}", python)
            what = f"Python {version}, {age}"
            rows = list(checked(where, wheel, what=what, pins=oldest() if age == "oldest" else []))
            yield from rows
            yield from () if rows[0].fell else tested(where, unpacked, tests, what=what)
    for extra in PROJECT["optional-dependencies"] if extras else ():
        yield resolved(wheel, extra)


def interpreter(version: str) -> str | None:
    """Return a Python of that version that starts, which a version manager's shim may not."""
    of_pyenv = sorted(Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")).glob(f"versions/{version}.*/bin/python"))
    for found in (shutil.which(f"python{version}"), *map(str, of_pyenv)):
        if found and not run(found, "-c", f"import sys, venv; assert sys.version.startswith('{version}.')"):
            return found
    return None


def built(folder: Path) -> tuple[Path, Path]:
    """Build wheel and source archive with the build backend in an environment of its own."""
    python = environment(folder / "build", sys.executable)
    must(python, "-m", "pip", "install", "--quiet", *BUILD)
    must(python, "-m", "hatchling", "build", "-d", str(folder / "dist"), cwd=ROOT)
    (wheel,), (source,) = (folder / "dist").glob("*.whl"), (folder / "dist").glob("*.tar.gz")
    return wheel, source


def differing(wheel: Path, source: Path, folder: Path) -> str:
    """Return the differences between a wheel and the one that pip builds from the source archive; empty if there are none."""
    if fell := run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", str(folder), str(source)):
        return fell
    with ZipFile(wheel) as first, ZipFile(next(folder.glob("*.whl"))) as second:
        names = {*first.namelist()} ^ {*second.namelist()}
        return " ".join(sorted(names or {name for name in first.namelist() if first.read(name) != second.read(name)}))


def checked(python: str, wheel: Path, *, what: str, pins: Sequence[str]) -> Iterator[Row]:
    """Install the wheel and run the program in an empty folder."""
    fell = run(python, "-m", "pip", "install", "--quiet", f"{wheel}[{','.join(LIGHT)}]", *pins)
    yield Row(f"{what}: installed ({', '.join(versions(python))})", fell)
    bin_ = Path(python).parent
    empty = bin_.with_name("empty")
    empty.mkdir()
    for said in () if fell else SAID:
        yield Row(f"{what}: zeroplan {' '.join(said)}", run(str(bin_ / "zeroplan"), *said, cwd=empty))


def tested(python: str, source: Path, tests: Sequence[str], *, what: str) -> Iterator[Row]:
    """Run the tests that need no torch. They can find only the installed package."""
    if tests:
        must(python, "-m", "pip", "install", "--quiet", *TOOLS)
        said = (python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *_LENIENT, *tests)
        yield Row(f"{what}: tests", run(*said, cwd=source))


#: Old releases of libraries cause deprecation warnings, which are no fault of ours.
_LENIENT = ("-W", "ignore::DeprecationWarning")


def oldest() -> list[str]:
    """Return the oldest release that each dependency's bound admits, in pip's form."""
    asked = [*PROJECT["dependencies"], *(one for extra in LIGHT for one in PROJECT["optional-dependencies"][extra])]
    return [re.sub(r">=", "==", one.partition(";")[0].strip()) for one in asked]


def versions(python: str) -> list[str]:
    """Return name and version of each installed dependency."""
    listed = subprocess.run([python, "-m", "pip", "list", "--format=freeze"], capture_output=True, text=True, check=True).stdout
    names = {re.split(r"[\[>=<]", one)[0].lower() for one in PROJECT["dependencies"]}
    return [line.replace("==", " ") for line in listed.splitlines() if line.partition("==")[0].lower() in names]


def resolved(wheel: Path, extra: str) -> Row:
    """Let pip resolve an extra alone, without installing it."""
    said = (sys.executable, "-m", "pip", "install", "--dry-run", "--quiet", "--ignore-installed", f"{wheel}[{extra}]")
    return Row(f"extra {extra} resolves", run(*said))


def environment(folder: Path, python: str) -> str:
    """Make an environment and return its Python."""
    must(python, "-m", "venv", str(folder))
    return str(folder / "bin" / "python")


def run(*command: str, cwd: Path | None = None) -> str:
    """Run a command; return the end of its output if it failed, else an empty text."""
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(command, cwd=cwd, env=clean, capture_output=True, text=True, check=False)
    said = "\n".join((done.stdout + done.stderr).strip().splitlines()[-_TAIL:])
    return "" if done.returncode == 0 else said or f"exit code {done.returncode}"


def must(*command: str, cwd: Path | None = None) -> None:
    """Run a command that all else needs; exit if it fails."""
    if fell := run(*command, cwd=cwd):
        raise SystemExit(f"{' '.join(command)} fell:\n{fell}")


if __name__ == "__main__":
    raise SystemExit(main())
