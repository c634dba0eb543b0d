"""How quick and how light is an answer? Run it in the environment to be measured: ``python tests/benchmarks/estimate.py``.

Two figures: the whole process against the bare imports of the two libraries it is built on, and ``estimate(job)`` for a job
that is already built. Each is the best of many runs, since other work on the machine only ever adds.
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


#: Starts a command so often from a process that is smaller than any it starts: a new process is charged with what the one that
#: starts it takes. 1 is an answer (no), and 3 is one (a measurement disagrees).
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
    """Least wall time [s] and largest resident memory [KiB] of a command's runs, and what they printed."""

    seconds: float
    kib: int
    said: str


def best(command: list[str], *, runs: int = RUNS) -> Timed:
    """Run a command so often. Raises CalledProcessError where it fails."""
    with tempfile.NamedTemporaryFile() as said:
        small = [sys.executable, "-I", "-S", "-c", SMALL, str(runs), said.name, *command]
        seconds, kib = subprocess.run(small, stdout=subprocess.PIPE, text=True, check=True).stdout.split()
        return Timed(float(seconds), int(kib), Path(said.name).read_text(encoding="utf-8"))


def per_estimate_s(**said: object) -> float:
    """Least time of one ``estimate`` of a job that is already built. [s]"""
    ready = job(**said)
    return min(timeit.repeat(lambda: estimate(ready), number=100, repeat=20)) / 100


def main() -> None:
    """Print the table."""
    bare = best(BARE_IMPORTS).seconds
    whole, memory, _ = best(COMMAND)
    print(f"bare imports of pydantic and typer   {bare * 1000:8.1f} ms")
    print(f"zeroplan estimate ... --json         {whole * 1000:8.1f} ms   {whole / bare:.2f} times, {memory / 1024:.1f} MiB")
    for name, said in JOBS.items():
        print(f"estimate(job): {name:<42}{per_estimate_s(**said) * MILLION:8.0f} us")


if __name__ == "__main__":
    main()
