"""How quick and how light is an answer? Run it in the environment to be measured: ``python benchmarks/estimate.py``.

Two figures: the whole process against the bare imports of the two libraries it is built on, and ``estimate(job)`` for a job
that is already built. Each is the best of many runs, since other work on the machine only ever adds.
"""

import os
import subprocess
import sys
import timeit
from pathlib import Path

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


def best(command: list[str]) -> tuple[float, int]:
    """Least wall time and largest resident memory over the runs. [s, KiB]"""
    seconds, memory = float("inf"), 0
    for _ in range(RUNS):
        start = timeit.default_timer()
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        if status:
            raise SystemExit(f"{' '.join(command)} failed")
        process.returncode = 0
        seconds, memory = min(seconds, timeit.default_timer() - start), max(memory, usage.ru_maxrss)
    return seconds, memory


def per_estimate_s(**said: object) -> float:
    """Least time of one ``estimate`` of a job that is already built. [s]"""
    ready = job(**said)
    return min(timeit.repeat(lambda: estimate(ready), number=100, repeat=20)) / 100


def main() -> None:
    """Print the table."""
    bare, _ = best(BARE_IMPORTS)
    whole, memory = best(COMMAND)
    print(f"bare imports of pydantic and typer   {bare * 1000:8.1f} ms")
    print(f"zeroplan estimate ... --json         {whole * 1000:8.1f} ms   {whole / bare:.2f} times, {memory / 1024:.1f} MiB")
    for name, said in {
        "7e9 parameters, FSDP2": {"params": "7e9", "gpus": 8, "stage": 3},
        "llama-3.1-405b, FSDP2, recomputed": {"model": "llama-3.1-405b", "gpus": 1024, "stage": 3, "recompute": "full"},
        "mixtral-8x7b, FSDP2": {"model": "mixtral-8x7b", "gpus": 16, "stage": 3},
        "deepseek-v3, FSDP2": {"model": "deepseek-v3", "gpus": 512, "stage": 3},
        "7e9 parameters, DDP": {"params": "7e9", "gpus": 8, "stage": 0},
        "7e9 parameters, ZeroRedundancyOptimizer": {"params": "7e9", "gpus": 8, "stage": 1},
        "7e9 parameters, DeepSpeed stage 2": {"params": "7e9", "gpus": 8, "stage": 2, "engine": "deepspeed"},
        "7e9 parameters, DeepSpeed stage 3": {"params": "7e9", "gpus": 8, "stage": 3, "engine": "deepspeed"},
        "7e9 parameters, paper": {"params": "7e9", "gpus": 8, "stage": 3, "engine": "paper"},
    }.items():
        print(f"estimate(job): {name:<42}{per_estimate_s(**said) * MILLION:8.0f} us")


if __name__ == "__main__":
    main()
