"""Measure the time and memory of one estimate: run ``python tests/benchmarks/estimate.py`` in the environment to measure.

It prints the time of the whole process, compared with the bare imports of typer and pydantic, and the time of ``estimate(job)`` for
a job that already exists. Each time is the best of many runs, because other work on the machine can only add time.
"""

import subprocess
import sys
import tempfile
import timeit
from pathlib import Path
from typing import NamedTuple

from zeroplan import estimate, job

COMMAND = [
    str(Path(sys.executable).with_name("zeroplan")),
    "estimate",
    "--params",
    "7e9",
    "--gpus",
    "8",
    "--stage",
    "3",
    "--json",
]
BARE_IMPORTS = [sys.executable, "-c", "import pydantic, typer"]
RUNS = 40
MILLION = 10**6
JOBS: dict[str, dict[str, object]] = {
    "7e9 parameters, FSDP2": {"params": "7e9", "gpus": 8, "stage": 3},
    "llama-3.1-405b, FSDP2, recomputed": {"model": "llama-3.1-405b", "gpus": 1024, "stage": 3, "recompute": "full"},
    "mixtral-8x7b, FSDP2": {"model": "mixtral-8x7b", "gpus": 16, "stage": 3},
    "deepseek-v3, FSDP2": {"model": "deepseek-v3", "gpus": 512, "stage": 3},
    "7e9 parameters, DDP": {"params": "7e9", "gpus": 8, "stage": 0},
    "7e9 parameters, ZeroRedundancyOptimizer": {"params": "7e9", "gpus": 8, "stage": 1},
    "7e9 parameters, DeepSpeed stage 2": {"params": "7e9", "gpus": 8, "stage": 2, "engine": "deepspeed"},
    "7e9 parameters, DeepSpeed stage 3": {"params": "7e9", "gpus": 8, "stage": 3, "engine": "deepspeed"},
    "llama-2-7b, Megatron-Core, stage 1": {"model": "llama-2-7b", "gpus": 8, "stage": 1, "engine": "megatron"},
    "7e9 parameters, paper": {"params": "7e9", "gpus": 8, "stage": 3, "engine": "paper"},
}


#: Runs a command ``argv[1]`` times and prints its least time and largest memory. Its process is smaller than that of any command,
#: because the peak memory that Linux reports for a new process includes that of the process that starts it. Exit codes 1 (it does
#: not fit) and 3 (a measurement disagrees) are answers, too.
SMALL = """
import os, sys, time
seconds, kib = 1e9, 0
said, quiet = os.open(sys.argv[2], os.O_RDWR | os.O_APPEND), os.open(os.devnull, os.O_RDWR)
for _ in range(int(sys.argv[1])):
    began = time.perf_counter()
    heard = [(os.POSIX_SPAWN_DUP2, said, 1), (os.POSIX_SPAWN_DUP2, quiet, 2)]
    child = os.posix_spawn(sys.argv[3], sys.argv[3:], os.environ, file_actions=heard)
    _, status, usage = os.wait4(child, 0)
    if os.waitstatus_to_exitcode(status) not in (0, 1, 3):
        sys.exit(5)
    seconds, kib = min(seconds, time.perf_counter() - began), max(kib, usage.ru_maxrss)
print(seconds, kib)
"""


class Timed(NamedTuple):
    """A command's least wall time [s], its largest resident memory [KiB], and what all its runs printed."""

    seconds: float
    kib: int
    said: str


def best(command: list[str], *, runs: int = RUNS) -> Timed:
    """Run a command ``runs`` times. Raises CalledProcessError if it fails."""
    with tempfile.NamedTemporaryFile() as said:
        small = [sys.executable, "-I", "-S", "-c", SMALL, str(runs), said.name, *command]
        seconds, kib = subprocess.run(small, stdout=subprocess.PIPE, text=True, check=True).stdout.split()
        return Timed(float(seconds), int(kib), Path(said.name).read_text(encoding="utf-8"))


def per_estimate_s(**said: object) -> float:
    """Return the least time of one ``estimate`` of a job that already exists. [s]"""
    ready = job(**said)
    return min(timeit.repeat(lambda: estimate(ready), number=100, repeat=20)) / 100


def main() -> None:
    """Print the times and the memory."""
    bare = best(BARE_IMPORTS).seconds
    whole, memory, _ = best(COMMAND)
    print(f"bare imports of pydantic and typer   {bare * 1000:8.1f} ms")
    print(f"zeroplan estimate ... --json         {whole * 1000:8.1f} ms   {whole / bare:.2f} times, {memory / 1024:.1f} MiB")
    for name, said in JOBS.items():
        print(f"estimate(job): {name:<42}{per_estimate_s(**said) * MILLION:8.0f} us")


if __name__ == "__main__":
    main()
