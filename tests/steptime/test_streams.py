"""The closed formulas of sending.py beside the same step played on streams, in random jobs of FSDP."""

from __future__ import annotations

import random
from statistics import median
from typing import TYPE_CHECKING

import pytest

from tests.steptime.streams import Streams, Unit, micro_batch
from zeroplan import JobSpec, job
from zeroplan.estimator import account_of
from zeroplan.ledger import Among, Phase
from zeroplan.steptime import step_time
from zeroplan.steptime.links import Links, links, seconds
from zeroplan.steptime.parts import Does
from zeroplan.steptime.sending import group_of
from zeroplan.steptime.work import of_one, work

if TYPE_CHECKING:
    from zeroplan.ledger import Collective

JOBS = 30


def drawn(seed: int) -> JobSpec:
    pick = random.Random(seed).choice  # noqa: S311
    return job(
        model=pick(["llama-3.1-8b", "llama-3.2-1b", "qwen3-0.6b", "llama-3.1-70b"]), gpu=pick(["h100", "a100", "h200", "b200"]),
        gpus=pick([8, 16, 64, 256, 1024]), engine=pick(["fsdp2", "fsdp1"]), seq_len=pick([512, 2048, 4096, 16384]),
        micro_batch=pick([1, 2, 4]), grad_accum=pick([1, 2, 4]), recompute=pick(["none", "full"]),
        network=pick([50, 100, 200, 400]),
    )  # fmt: skip


def played_and_told(one: JobSpec) -> tuple[float, float, float]:
    """Return forwards and backwards with their waits, played on streams and as the clock says, and without them. [s]"""
    here, account = links(one.cluster), account_of(one, one.batch)
    assert here is not None
    found = step_time(account, one.model, one.recipe, one.mesh, one.batch, one.cluster, mfu=0.4)
    named = {part.name: float(part.seconds) for part in found.parts}
    told = sum(float(part.seconds) for part in found.parts if part.does in (Does.COMPUTING, Does.SENDING))
    asked = work(one.model, one.recipe, of_one(int(one.batch.micro_batch_size), int(one.batch.seq_len)))
    streams, layers, steps = Streams(here.taken), one.model.num_hidden_layers, int(one.batch.grad_accum_steps)
    passes = named["forward"], named["backward"] + named["recomputation"]
    forward, backward = (each / steps for each in passes)
    head = asked.head_flops / asked.flops

    def sent(phase: Phase, operation: str, *, root: bool) -> float:
        several = (call for call in account.collectives if call.phase is phase and call.is_root is root)
        return sum(_seconds(call, one, here) for call in several if operation == _kind(call)) / steps / (1 if root else layers)

    root = Unit(0.0, 0.0, sent(Phase.FORWARD, "gather", root=True), 0.0, sent(Phase.BACKWARD, "reduce", root=True))
    block = Unit(
        forward * (1 - head) / layers, backward * (1 - head) / layers, sent(Phase.FORWARD, "gather", root=False),
        sent(Phase.BACKWARD, "gather", root=False), sent(Phase.BACKWARD, "reduce", root=False),
    )  # fmt: skip
    for _ in range(steps):
        micro_batch(streams, root, [block] * layers, Unit(forward * head, backward * head, 0.0, 0.0, 0.0))
    return streams.computed, told, sum(passes)


def _kind(call: Collective) -> str:
    return "gather" if call.operation == "all_gather" else "reduce"


def _seconds(call: Collective, one: JobSpec, here: Links) -> float:
    assert call.among in (Among.SHARDS, Among.REPLICAS)
    return float(seconds(call, group_of(call, one.recipe, one.mesh, here), here))


def test_the_formulas_say_what_is_played_on_streams():
    """Within 3 % in every job and 0.5 % in the median; a fifth and more of some is waiting, a twentieth and less of others."""
    found = [played_and_told(drawn(seed)) for seed in range(JOBS)]
    ratios = [abs(told / played - 1) for played, told, _ in found]
    assert max(ratios) < 0.03
    assert median(ratios) < 0.005
    waiting = [1 - computing / played for played, _, computing in found]
    assert sum(share > 0.2 for share in waiting) > 5 < sum(share < 0.05 for share in waiting)


def test_two_blocks_by_hand():
    """Gathers of 1 s each way, blocks of 3 s and 6 s, reductions of 2 s, and no SMs taken: 23 s; with a quarter taken, 24.7 s."""
    block, nothing = Unit(3.0, 6.0, 1.0, 1.0, 2.0), Unit(0.0, 0.0, 0.0, 0.0, 0.0)
    streams = Streams(0.0)
    micro_batch(streams, nothing, [block, block], nothing)
    assert streams.computed == pytest.approx(1 + 3 + 3 + 1 + 6 + 6 + 2)
    slower = Streams(0.25)
    micro_batch(slower, nothing, [block, block], nothing)
    assert slower.computed == pytest.approx(22.0 + (1 + 1 + 2) / 3 * 0.75)
