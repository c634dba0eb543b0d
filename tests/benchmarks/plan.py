"""Measure the time and memory of a plan: run ``python tests/benchmarks/plan.py`` in the environment to measure.

It prints the time of the whole command, the best of several runs. It also prints how many layouts per second a warm program
computes, compares with the GPU and sorts, and the memory this takes. One structure takes about as long with one layout as with a
thousand, so the rate depends on the number of layouts per structure.
"""

import os
import resource
import subprocess
import sys
import timeit
from pathlib import Path

from zeroplan import job
from zeroplan.planner import Fixed
from zeroplan.planner.objectives import field, ordered, pareto
from zeroplan.planner.search import search

COMMAND = [
    str(Path(sys.executable).with_name("zeroplan")),
    *("plan", "--model", "llama-3.1-70b", "--gpu", "h100-sxm-80gb", "--gpus", "64", "--seq-len", "8192"),
    *("--global-batch", "1024", "--json"),
]
RUNS = 5
SEARCHES = (
    ("llama-3.1-70b", 64, 1024),
    ("llama-3.1-8b", 64, 1024),
    ("llama-3.1-8b", 720, 720 * 5040),
    ("llama-3.1-8b", 5040, 5040 * 27720),
    ("llama-3.1-8b", 110_880, 110_880 * 55_440),
)


def whole_s() -> tuple[float, float]:
    """Return the command's least wall time and least processor time. [s]"""
    wall = processor = float("inf")
    for _ in range(RUNS):
        start = timeit.default_timer()
        process = subprocess.Popen(COMMAND, stdout=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        if status:
            raise SystemExit(f"{' '.join(COMMAND)} failed")
        process.returncode = 0
        wall, processor = min(wall, timeit.default_timer() - start), min(processor, usage.ru_utime + usage.ru_stime)
    return wall, processor


def searched(model: str, gpus: int, batch: int) -> tuple[int, int, float]:
    """Return the layouts considered, the layouts computed, and the least processor time of finding and sorting them. [s]"""
    base, fixed = job(model=model, gpu="h100", gpus=gpus, seq_len=4096), Fixed(global_batch_size=batch)
    answer = search(base, fixed)
    computed = sum(one.grid.layouts for one in answer.found)
    considered = computed + sum(one.layouts for one in answer.tally.fallen)
    gpu = base.cluster.gpu
    room = 0 if gpu is None else int(gpu.memory_bytes.value)

    def ranked() -> None:
        layouts = field(search(base, fixed).found)
        pareto(layouts, layouts.least_bytes <= room)
        ordered(layouts, "throughput", float(layouts.tokens_per_s.max()))

    return considered, computed, min(timeit.repeat(ranked, number=1, repeat=RUNS, timer=_processor_s))


def _processor_s() -> float:
    return sum(os.times()[:2])


def main() -> None:
    """Print the times, the rates and the memory."""
    wall, processor = whole_s()
    print(f"zeroplan plan, 70B on 64 GPUs        {wall:8.2f} s, of the processor {processor:.2f} s")
    for model, gpus, batch in SEARCHES:
        considered, computed, seconds = searched(model, gpus, batch)
        rates = f"{computed / seconds:12,.0f} computed/s {considered / seconds:14,.0f} considered/s"
        print(f"search: {model}, {gpus} GPUs, batch {batch:,}: {computed:,} computed in {seconds:.2f} s {rates}")
    print(f"memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB")


if __name__ == "__main__":
    main()
