"""Measure the speed and memory of zeroplan, and write docs/benchmarks.md: ``python -m tests.benchmarks.all``.

It takes a few minutes on an idle machine. The page names the machine and the versions. A time is the best of its runs, because
other work on the machine can only add time; a memory is the largest of a process. llm-analysis pins versions that exclude recent
transformers: ``--llm-analysis PYTHON`` names the Python of an environment that has it. Otherwise its row says "not installed here".
"""

import argparse
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from http.client import HTTPConnection
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from tests.benchmarks import estimate as estimates
from tests.benchmarks import peers
from tests.benchmarks import plan as plans

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "benchmarks.md"
SMALL = ("--model", "gpt2", "--gpu", "l4-24gb", "--gpus", "2", "--seq-len", "256")
SEVEN = ("--params", "7e9", "--gpus", "8", "--stage", "3")
#: Commands that answer at once. RECORD and p.svg are replaced by paths in a temporary folder.
COMMANDS: tuple[tuple[str, ...], ...] = (
    ("--version",), ("estimate", *SEVEN), ("estimate", *SEVEN, "--json"), ("estimate", "--help"),
    ("advise", *SMALL), ("plan", *SMALL), ("models",), ("gpus",), ("compare", "RECORD"),
    ("plot", "stages", *SMALL, "--out", "p.svg"),
)  # fmt: skip
SIMULATED: tuple[tuple[str, ...], ...] = (
    ("--model", "gpt2", "--gpus", "4", "--stage", "1"),
    ("--model", "llama-3.1-8b", "--gpus", "8", "--stage", "3"),
    ("--model", "llama-3.1-405b", "--gpus", "1024", "--stage", "3", "--recompute", "full"),
    ("--model", "gpt2", "--gpus", "4", "--stage", "2", "--engine", "deepspeed"),
)
ASKED = (
    "/", "/page.js", "/api/controls", "/api/answer?model=llama-2-7b&gpus=8&stage=3", "/api/changes?model=llama-2-7b&gpus=8&stage=3",
    "/api/plan?model=gpt2&gpu=l4-24gb&gpus=2",
)  # fmt: skip
PACKAGES = ("zeroplan", "pydantic", "typer", "numpy", "fastapi", "torch", "transformers", "deepspeed", "accelerate")
MILLI, MILLION, MIB, GIB = 1000, 10**6, 2**20, 2**30
_RUNS, _FEW = 10, 3


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure everything, print each table as soon as it is measured, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=PAGE, help="the page to write; docs/benchmarks.md where nothing is said")
    parser.add_argument("--only", choices=SECTIONS, action="append", help="measure this alone and write no page; repeatable")
    parser.add_argument("--llm-analysis", default="", metavar="PYTHON", help="the Python of an environment with llm-analysis")
    asked = parser.parse_args(arguments)
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed program has its bytecode on disk
    os.environ.update(HF_HUB_OFFLINE="1")
    began, parts = time.monotonic(), []
    for name, section in SECTIONS.items():
        if asked.only and name not in asked.only:
            continue
        parts.append(section(asked.llm_analysis))
        print(parts[-1], flush=True)
    print(f"took {time.monotonic() - began:.0f} s")
    if not asked.only:
        asked.out.write_text("\n\n".join((head(), *parts)) + "\n", encoding="utf-8")


def head() -> str:
    """Return the start of the page: what it measures, on which machine and versions."""
    gib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / GIB
    said = ", ".join(f"{name} {found}" for name in PACKAGES if (found := _version(name)))
    return f"""# Benchmarks

How much time and memory does zeroplan need for an answer, and what do other calculators need? `python -m tests.benchmarks.all`
measures all of it in a few minutes and writes this page. It needs the repository and the extras `verify` and `web`.
These figures are from {os.cpu_count()} cores ({platform.machine()}), {gib:.0f} GiB of memory, no GPU, {platform.system()};
Python {platform.python_version()},
{said}.

Every time is the best of several runs, and every memory the largest of the process. Times depend on the machine; compare the
ratios."""


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table; all columns except the first are numbers.

    >>> print(table(("a", "b"), [("x", "1")]))
    | a | b |
    | --- | ---: |
    | x | 1 |
    """
    lines = [columns, ["---", *["---:"] * (len(columns) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


# The program


def commands(_peer: str = "", *, said: Sequence[tuple[str, ...]] = COMMANDS, runs: int = _RUNS) -> str:
    """Return the time and memory of each command in its own process, and the ratio to a Python that imports typer and pydantic."""
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / "record.json"
        record.write_text(peers.RECORDS.read_text(encoding="utf-8").splitlines()[0], encoding="utf-8")
        places = {"RECORD": str(record), "p.svg": str(Path(folder) / "p.svg")}
        bare_s, bare_kib, _ = estimates.best(estimates.BARE_IMPORTS, runs=runs)
        rows = [("`import pydantic, typer`", f"{bare_s * MILLI:,.0f}", "1.00", f"{bare_kib / 1024:,.0f}", "1.00")]
        for one in said:
            command = [estimates.COMMAND[0], *(places.get(word, word) for word in one)]
            seconds, kib, _ = estimates.best(command, runs=runs)
            rows.append(
                (f"`zeroplan {' '.join(one)}`", f"{seconds * MILLI:,.0f}", f"{seconds / bare_s:.2f}", f"{kib / 1024:,.0f}",
                 f"{kib / bare_kib:.2f}")
            )  # fmt: skip
    return f"""## Each command

The whole process of a command, compared with a Python that only imports the two libraries of every such command line.

{table(("", "ms", "times the imports", "MiB", "times the imports"), rows)}"""


def one_estimate(_peer: str = "") -> str:
    """Return the time of ``estimate(job)`` for each job of ``estimate.JOBS``."""
    rows = [(name, f"{estimates.per_estimate_s(**said) * MILLION:,.0f}") for name, said in estimates.JOBS.items()]
    return f"""## One estimate

`estimate(job)` for a job that already exists, called repeatedly in one process.

{table(("job", "µs"), rows)}"""


def searches(_peer: str = "") -> str:
    """Return how many layouts the planner considers and computes per second."""
    rows = []
    for model, gpus, batch in plans.SEARCHES:
        considered, computed, seconds = plans.searched(model, gpus, batch)
        rows.append(
            (f"{model}, {gpus:,} GPUs, global batch {batch:,}", f"{computed:,}", f"{considered:,}", f"{seconds:.2f}",
             f"{computed / seconds:,.0f}", f"{considered / seconds:,.0f}")
        )  # fmt: skip
    return f"""## A search

*Considered* layouts are all that exist; rules reject most of them. *Computed* layouts are estimated in full, compared with the
GPU and sorted. The time is processor time of one core, after a first search.

{table(("plan", "computed", "considered", "s", "computed/s", "considered/s"), rows)}"""


def simulations(_peer: str = "", *, said: Sequence[tuple[str, ...]] = SIMULATED) -> str:
    """Return the time and memory of ``zeroplan verify``, which runs the engine on fake tensors."""
    rows = []
    for one in said:
        seconds, kib, _ = estimates.best([estimates.COMMAND[0], "verify", *one], runs=1)
        rows.append((f"`zeroplan verify {' '.join(one)}`", f"{seconds:.1f}", f"{kib / 1024:,.0f}"))
    return f"""## A simulation

The engine's own code on fake tensors: the whole command, run once, with the import of torch and transformers. The memory is that of
the largest process.

{table(("", "s", "MiB"), rows)}"""


# The page


def page(_peer: str = "", *, asked: Sequence[str] = ASKED, runs: int = 20) -> str:
    """Return how long the server of ``zeroplan explore`` takes to answer each request of its page."""
    rows = []
    with _served() as port:
        for path in asked:
            taken = [_asked(port, f"{path}{f'&seq_len={256 + 8 * at}' if '?' in path else ''}") for at in range(runs)]
            rows.append((f"`{path}`", f"{min(taken) * MILLI:.1f}", f"{statistics.median(taken) * MILLI:.1f}"))
    return f"""## The page

Requests to `zeroplan explore` over the loopback. Each uses a new connection and another sequence length, so that no earlier answer
can be reused. The table has the best and the median of {runs}.

{table(("", "best, ms", "median, ms"), rows)}"""


@contextmanager
def _served() -> Iterator[int]:
    import uvicorn

    from zeroplan.explore.server import explore_app

    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(explore_app(), log_level="critical", lifespan="off"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    yield listening.getsockname()[1]
    server.should_exit = True
    thread.join(timeout=10)


def _asked(port: int, path: str) -> float:
    began = time.perf_counter()
    connection = HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", path)
    response = connection.getresponse()
    response.read()
    connection.close()
    if response.status != 200:
        raise SystemExit(f"{path} answered {response.status}")
    return time.perf_counter() - began


# The others


def beside_others(peer: str = "", *, names: Sequence[str] = tuple(peers.PEERS)) -> str:
    """Return the answers, times and memory of all calculators for one job; those that are not installed are listed as such."""
    truth = peers.truth_bytes()
    rows, ours = [], None
    for name in names:
        found = _peer(name, peer)
        if found is None:
            rows.append((name, "not installed here", "", "", "", ""))
            continue
        n_bytes, answer_s, whole_s, kib = found
        ours = ours or whole_s
        rows.append(
            (name, f"{n_bytes / GIB:.2f}", f"{n_bytes / truth:.2f}", _short(answer_s), f"{whole_s:.2f}", f"{whole_s / ours:.1f}",
             f"{kib / 1024:,.0f}")
        )  # fmt: skip
    columns = ("", "answer, GiB", "over the engine's", "answer, s", "whole process, s", "times ours", "MiB")
    return f"""## The same job through others

Llama 2 7B on 8 GPUs, FSDP2 with stage 3, bf16 mixed precision, AdamW tensor by tensor, one sequence of 4,096 tokens, nothing
recomputed: the engine allocates {truth / GIB:.2f} GiB at its peak. Each calculator runs in its own process. The table has its
answer, the time of the answer alone, and the time with all imports.

- DeepSpeed's calculator counts only model states, no activations.
- accelerate's counts one GPU, without shards or activations. Its command downloads the model's configuration; here we call its
  functions for the same model, offline.
- torch's tracker and `zeroplan verify` run the engine.

[More calculators](validation.md#the-same-jobs-through-other-calculators), on more jobs.

{table(columns, [(*row, *[""] * (len(columns) - len(row))) for row in rows])}"""


def _peer(name: str, other: str) -> tuple[float, float, float, int] | None:
    """Return a peer's answer [bytes], its time and that of the whole process [s], and the process's memory [KiB].

    Returns None if the peer's process fails, as it does if the peer is not installed.
    """
    python = other if name == "llm-analysis" and other else sys.executable
    try:
        timed = estimates.best(
            [python, str(ROOT / "tests" / "benchmarks" / "peers.py"), name], runs=1 if name in _LONG else _FEW
        )
    except subprocess.CalledProcessError:
        return None
    found = [json.loads(line) for line in timed.said.splitlines() if line.startswith('{"bytes"')]
    if not found:  # a failed import ends with exit code 1, which a command's answer may have too
        return None
    return found[0]["bytes"], min(one["seconds"] for one in found), timed.seconds, timed.kib


_LONG = ("torch's FSDPMemTracker", "zeroplan verify, simulated")


def _short(seconds: float) -> str:
    """Return seconds with two significant digits.

    >>> _short(0.000123), _short(12.3)
    ('0.00012', '12')
    """
    return f"{seconds:.2g}" if 1e-4 <= seconds < 100 else f"{seconds:.0e}" if seconds < 1e-4 else f"{seconds:.0f}"


SECTIONS: dict[str, Callable[[str], str]] = {
    "commands": commands,
    "estimate": one_estimate,
    "search": searches,
    "simulate": simulations,
    "page": page,
    "peers": beside_others,
}


if __name__ == "__main__":
    main()
