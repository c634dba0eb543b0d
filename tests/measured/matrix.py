"""Measures the matrix: ``python -m tests.measured.matrix`` from the repository's root.

Every job of the sample is simulated (real engine, fake tensors) in a process of its own and leaves one line. Jobs that have a
line are skipped, so it may be stopped at any time and goes on where it was. ``--sample`` names another sample: ``fresh`` has
jobs that nobody looked at while the estimate was made, ``peers`` those that other calculators were asked for and that the
pages draw, ``options`` those with fine-tuning, offload and ZeRO++, ``options_torch`` those over the options of DDP and FSDP2,
every optimizer and few ranks, ``options_deepspeed`` and ``fsdp1`` the same for DeepSpeed and FSDP1, ``stage3_first`` those of
DeepSpeed's stage 3 whose peak is in the first micro-batches, ``rooms`` those that are also replayed with ever
smaller cards. ``--table`` prints how far the estimate is off. At the end the validation page is written anew
(:mod:`tests.measured.page`).
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING

from tests.measured import options, options_deepspeed, options_fsdp1, options_torch, peers, stage3_first, stored
from tests.measured.drawn import FRESH_SEED, ROOMS_SEED, drawn
from zeroplan import estimate
from zeroplan.ledger import Phase

if TYPE_CHECKING:
    from collections.abc import Sequence
    from multiprocessing.connection import Connection
    from pathlib import Path

    from zeroplan.measurement import Measurement
    from zeroplan.spec.job import JobSpec

#: Imported once; every case begins as a copy of that process. Not DeepSpeed, which patches torch.
_READY = ["zeroplan.verify.backends.simulate", "transformers.models.auto.modeling_auto"]


def main() -> None:
    """Run the jobs without a line, or print the table."""
    asked = _asked()
    if asked.table:
        from tests.measured.errors import table

        print(table(stored.records(_PATHS[asked.sample]), stored.refusals()))
        return
    missing = [package for package in ("torch", "transformers", "deepspeed") if find_spec(package) is None]
    if missing:
        sys.exit(f"not installed, and the engines need it: {', '.join(missing)}")
    if asked.retry:
        stored.REFUSED.unlink(missing_ok=True)
    _measure_what_is_left(asked)

    from tests.measured import page

    page.write()


_PATHS = {"matrix": stored.RECORDS, "fresh": stored.FRESH, "peers": stored.PEERS, "options": stored.OPTIONS,
          "options_torch": stored.OPTIONS_TORCH, "options_deepspeed": stored.OPTIONS_DEEPSPEED, "fsdp1": stored.FSDP1,
          "stage3_first": stored.STAGE3_FIRST, "rooms": stored.ROOMS}  # fmt: skip


def _jobs(asked: argparse.Namespace) -> Sequence[JobSpec]:
    if asked.sample == "peers":
        return peers.jobs()
    draw, count = {
        "matrix": (drawn, 600),
        "fresh": (partial(drawn, seed=FRESH_SEED), 100),
        "rooms": (partial(drawn, seed=ROOMS_SEED), 90),
        "options": (options.drawn, 110),
        "options_torch": (options_torch.drawn, 90),
        "options_deepspeed": (options_deepspeed.drawn, 84),
        "fsdp1": (options_fsdp1.drawn, 60),
        "stage3_first": (stage3_first.drawn, 30),
    }[asked.sample]
    return draw(asked.cases or count)


def _measure_what_is_left(asked: argparse.Namespace) -> None:
    jobs, path = _jobs(asked), _PATHS[asked.sample]
    done = {record.job for record in stored.records(path)} | {refusal.job for refusal in stored.refusals()}
    left = [job for job in jobs if job not in done]
    print(f"{len(jobs) - len(left)} of {len(jobs)} cases have a record", flush=True)
    try:
        _run(left, path, seconds=asked.seconds, silent_after=asked.timeout)
    finally:
        stored.sort(path, jobs)


def _asked() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sample", choices=_PATHS, default="matrix", help="which jobs")
    counts = "600, 100 fresh, 110 with options, 90 of torch's, 84 of DeepSpeed's, 60 of FSDP1's, 30 first steps, 90 for rooms"
    parser.add_argument("--cases", type=int, help=f"how many of its jobs ({counts})")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no other case after so long")
    parser.add_argument("--timeout", type=float, default=180.0, help="give a case up after so many seconds")
    parser.add_argument("--retry", action="store_true", help="try again what could not be measured")
    parser.add_argument("--table", action="store_true", help="print the errors of the estimate, and run nothing")
    return parser.parse_args()


def _run(jobs: Sequence[JobSpec], path: Path, *, seconds: float, silent_after: float) -> None:
    began = time.monotonic()
    for number, job in enumerate(jobs):
        if time.monotonic() - began > seconds:
            return
        found = measured(job, silent_after=silent_after, least_room=path == stored.ROOMS)
        if isinstance(found, str):
            stored.keep_refusal(job, found)
        else:
            stored.keep(found if path == stored.PEERS else stored.without_courses(found), path)
        what = f"refused: {found}" if isinstance(found, str) else f"{found.seconds:.1f} s"
        recipe = job.recipe
        print(f"{number + 1}/{len(jobs)} {recipe.engine} {recipe.zero_stage} {job.model.name}: {what}", flush=True)


def measured(job: JobSpec, *, silent_after: float, least_room: bool = False, rank: int | None = None) -> Measurement | str:
    """Simulate a job in a process of its own; return the record, or why it failed in one line."""
    os.environ.update(HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_READY)
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_measure, args=(job, there, least_room, rank), daemon=True)
    process.start()
    there.close()
    try:
        return here.recv() if here.poll(silent_after) else f"no answer within {silent_after:g} s"
    except EOFError:
        process.join()
        return f"the process died with exit code {process.exitcode}"
    finally:
        process.kill()
        process.join()


def _measure(job: JobSpec, answer: Connection, least_room: bool, rank: int | None) -> None:
    """Send the record, or the reason for its absence. The output of engines is dropped."""
    with open(os.devnull, "w") as nowhere:  # noqa: PTH123
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    try:
        answer.send(_simulated(job, least_room=least_room, rank=rank))
    except BaseException as error:  # noqa: BLE001  whatever it is becomes the reason
        answer.send(" ".join(f"{type(error).__name__}: {error}".split())[:300])
    answer.close()
    os._exit(0)  # what a destroyed group leaves has nothing more to do


def _simulated(job: JobSpec, *, least_room: bool, rank: int | None = None) -> Measurement:
    import torch

    from zeroplan.verify.backends.simulate import simulate

    torch.set_num_threads(1)
    began = time.process_time()
    steps = 2 if job.recipe.engine in ("fsdp1", "fsdp2", "megatron") else 3  # FSDP1 prefetches forward from the second on
    found = simulate(
        job, rank=fullest_rank(job) if rank is None else rank, steps=steps, all_layers=False, least_room=least_room
    )
    return stored.small(replace(found, seconds=round(time.process_time() - began, 1)))


def fullest_rank(job: JobSpec) -> int:
    """Return the rank of the estimate's peak: rank 0, unless ranks own whole tensors."""
    if job.recipe.engine != "ddp" or job.recipe.zero_stage != 1:
        return 0
    from zeroplan.engines.ddp.zero_redundancy import fullest_share
    from zeroplan.engines.optimizers import implementation_of
    from zeroplan.engines.precisions import widths

    recipe, stored_bytes = job.recipe, widths(job.recipe.precision).stored
    found = fullest_share(job.model, recipe.optimizer, implementation_of(recipe), stored_bytes, job.mesh.dp_shard)
    return found.rank_in_step if estimate(job).peak.phase is Phase.STEP else found.rank


if __name__ == "__main__":
    main()
