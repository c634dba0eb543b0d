"""Does what a plan calls fitting fit? Plans drawn at random, started on fake tensors: ``python -m tests.planner.random_plans 50``.

Every engine and way of splitting a model takes its turn, on small models of several families and on cards of as many bytes as make
the search choose. Prints how far each plan's peak is off, and exits with 1 where one does not start or does not fit.
"""

import math
import multiprocessing
import random
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from typing import Any

from zeroplan import BatchSpec, ClusterSpec, JobSpec, MeshSpec, ModelSpec
from zeroplan.catalog.gpu import gpu
from zeroplan.comparison import compare_with_estimate
from zeroplan.engines.device import outside, total_band
from zeroplan.errors import SpecError
from zeroplan.planner import Fixed, Plan, plan
from zeroplan.spec.model import MoeSpec

#: What the search is held to, in turn; nothing else is decided.
TURNS: tuple[dict[str, Any], ...] = (
    {}, {"engine": "ddp"}, {"engine": "deepspeed"}, {"engine": "fsdp2"}, {"tp": 2}, {"cp": 2}, {"pp": 2}, {"ep": 2},
    {"engine": "deepspeed", "zero_stage": 3}, {"pp": 4}, {"tp": 4},
    {"tp": 2, "cp": 2}, {"cp": 2, "ep": 2},
)  # fmt: skip


def drawn(seed: int) -> tuple[JobSpec, Fixed]:
    """A model on a card of some size, and what is decided beforehand."""
    draw = random.Random(seed)  # noqa: S311  nothing secret is drawn
    said = TURNS[seed % len(TURNS)]
    heads, width = draw.choice((4, 8)), draw.choice((704, 1024))
    model = ModelSpec(
        family="mixtral" if "ep" in said else draw.choice(("llama", "qwen3", "mistral")), hidden_size=64 * heads,
        intermediate_size=width, num_hidden_layers=8 if "pp" in said else 4, num_attention_heads=heads,
        num_key_value_heads=4,
        head_dim=64, vocab_size=draw.choice((4096, 8192)),
        moe=MoeSpec(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=width) if "ep" in said else None,
    )  # fmt: skip
    card, gpus = gpu("h100"), draw.choice((8, 16))
    ways = {name: said[name] for name in ("tp", "cp", "pp") if name in said}
    split = MeshSpec(dp_shard=gpus // math.prod(ways.values()), ep=said.get("ep", 1), **ways)
    room = int(total_band(outside(split, card)).expected_bytes) + draw.randrange(300, 1_500) * 10**6
    base = JobSpec(
        model=model, cluster=ClusterSpec(gpu=replace(card, memory_bytes=replace(card.memory_bytes, value=room))),
        mesh=MeshSpec(dp_shard=gpus), batch=BatchSpec(seq_len=draw.choice((512, 1024))),
    )  # fmt: skip
    return base, Fixed(global_batch_size=64, **said)


def started(answer: Plan) -> tuple[float, int]:
    """How far the peak of the plan's own job is off when the engine takes it, and the peak. [share, bytes]"""
    from tests.simulated import simulate

    assert answer.best is not None
    job = answer.best.layout.job
    pipeline = answer.best.estimate.pipeline
    rank = pipeline[0].rank * (job.mesh.world_size // job.mesh.pp) if pipeline else 0
    compared = compare_with_estimate(simulate(job, steps=3, rank=rank))
    return compared.peak.error, compared.peak.measured


def held(seed: int) -> tuple[bool, str]:
    """Whether a plan holds, and a line that says so."""
    base, fixed = drawn(seed)
    try:
        answer = plan(base, fixed)
    except SpecError as refusal:
        return False, f"{seed}: refused: {refusal}"
    if answer.best is None:
        return True, f"{seed}: nothing fits"
    error, peak = started(answer)
    room = base.cluster.gpu.memory_bytes.value if base.cluster.gpu else 0
    fits = peak + answer.best.estimate.outside_band.expected_bytes <= room
    mesh, recipe = answer.best.layout.job.mesh, answer.best.layout.job.recipe
    split = f"tp {mesh.tp} cp {mesh.cp} pp {mesh.pp} ep {mesh.ep}"
    said = f"{recipe.engine} {recipe.zero_stage} {recipe.recompute}, {split}"
    return fits and abs(error) < 0.001, f"{seed}: {said}: {error:+.4%} of {peak:,} bytes, {'fits' if fits else 'DOES NOT FIT'}"


def every(count: int) -> Iterator[tuple[bool, str]]:
    """Plan after plan, each in a process of its own: DeepSpeed changes torch for good."""
    alone = {"max_workers": 1, "max_tasks_per_child": 1, "mp_context": multiprocessing.get_context("spawn")}
    with ProcessPoolExecutor(**alone) as pool:
        yield from pool.map(held, range(count))


def main() -> None:
    """Print a line for each."""
    wrong = 0
    for holds, line in every(int(sys.argv[1]) if len(sys.argv) > 1 else 50):
        print(line, flush=True)  # noqa: T201
        wrong += not holds
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
