"""The time of a pipeline, against published shares of the bubble and simulated orders of passes."""

from __future__ import annotations

import statistics
import tomllib
from pathlib import Path

import pytest

from zeroplan.engines.pipeline.order import Action, interleaved, zero_bubble
from zeroplan.engines.pipeline.schedule import Place, order_of
from zeroplan.estimator import account_of, estimate
from zeroplan.resolve import job
from zeroplan.spec.pipeline import SPLIT, indices_of_rank
from zeroplan.steptime import step_time
from zeroplan.steptime.efficiency import pcie_bytes_per_s
from zeroplan.steptime.pipeline import Bubble
from zeroplan.steptime.played import Costs, played

GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.mark.parametrize(("ranks", "chunks", "micro_batches"), [(4, 1, 8), (8, 1, 64), (4, 2, 8), (8, 4, 32)])
def test_equal_ranks_wait_as_long_as_is_published(ranks: int, chunks: int, micro_batches: int) -> None:
    """Narayanan et al. 2021, arXiv:2104.04473: (p - 1)/m in section 2.2.1, 1/v of that in 2.2.2."""
    bubble = Bubble((float(micro_batches),) * ranks, chunks, micro_batches)
    assert bubble.idle_s / bubble.pace_s == pytest.approx((ranks - 1) / (chunks * micro_batches))


@pytest.mark.parametrize(("ranks", "chunks", "micro_batches"), [(4, 2, 8), (2, 3, 6), (4, 4, 16)])
def test_the_simulated_order_takes_as_long(ranks: int, chunks: int, micro_batches: int) -> None:
    """A stage's forward takes 1, its backward 2. A pass begins when its rank is free and its inputs are there."""
    orders = [interleaved(rank=rank, pp=ranks, chunks=chunks, micro_batches=micro_batches) for rank in range(ranks)]
    bubble = Bubble((3.0 * chunks * micro_batches,) * ranks, chunks, micro_batches)
    assert _played(orders, chunks) == bubble.pace_s + bubble.idle_s


def _played(orders: list[tuple[Action, ...]], chunks: int) -> float:
    ranks, ended, free = len(orders), {}, [0.0] * len(orders)
    stages, waiting = ranks * chunks, [list(order) for order in orders]
    while any(waiting):
        for rank, order in enumerate(waiting):
            while order:
                one = order[0]
                stage = one.chunk * ranks + rank
                needs = [("forward", stage - 1)] if one.kind == "forward" else [("backward", stage + 1), ("forward", stage)]
                needs = [(kind, at, one.micro_batch) for kind, at in needs if 0 <= at < stages]
                if not all(need in ended for need in needs):
                    break
                free[rank] = max([free[rank], *(ended[need] for need in needs)]) + (1.0 if one.kind == "forward" else 2.0)
                ended[(one.kind, stage, one.micro_batch)] = free[rank]
                order.pop(0)
    return max(free)


@pytest.mark.parametrize(("ranks", "micro_batches"), [(4, 8), (8, 32)])
def test_weights_fill_the_bubble(ranks: int, micro_batches: int) -> None:
    """Qi et al. 2024, arXiv:2401.10241, table 1: (p - 1)(F + B - W) with ZB-1P, 1/v of that with v stages on each rank.

    If all three take equally long, that is a third of 1F1B's bubble. The V-shaped schedule has the same bubble.
    """
    places = {name: [Place(name, rank, ranks, 2, micro_batches) for rank in range(ranks)] for name in SPLIT}
    for name, cost in (("interleaved-zero-bubble", Costs(1.0, 1.25, 0.75)), ("zbv", Costs(1.0, 1.0, 1.0))):
        stages = tuple(indices_of_rank(name, rank=rank, pp=ranks, stages=2 * ranks) for rank in range(ranks))
        took = played(tuple(map(order_of, places[name])), stages, (cost,) * (2 * ranks))
        idle = (ranks - 1) * (cost.forward + cost.inputs - cost.weights)
        assert took - 6.0 * micro_batches == pytest.approx(idle)


class _AllSplit(Costs):
    """Costs of a pipeline whose first stage splits its backward too, as in Megatron."""

    def of(self, kind: str, _stage: int) -> float:
        """Return the cost of a pass."""
        return float({"forward": self.forward, "input": self.inputs, "weights": self.weights}[kind])


def test_zero_bubble_gains_over_1f1b_about_what_is_published() -> None:
    """Forward, backward and weight pass of a block as table 1 counts them, without fitting, in the order of ZB-1p."""
    errors = []
    for run in tomllib.loads((GOLDEN / "zero_bubble.toml").read_text())["run"]:
        matrices, scores = 24 * run["hidden"], 4 * run["seq_len"]
        cost = _AllSplit(matrices + scores, matrices + 2 * scores, matrices)
        ranks, count = run["ranks"], run["micro_batches"]
        orders = tuple(zero_bubble(rank=rank, pp=ranks, chunks=1, micro_batches=count) for rank in range(ranks))
        split = played(orders, tuple((rank,) for rank in range(ranks)), (cost,) * ranks)
        gain = Bubble((float(count * sum(cost)),) * ranks, 1, count)
        errors.append((gain.pace_s + gain.idle_s) / split / (run["ZB-1p"] / run["1F1B"]) - 1)
    assert len(errors) == 12
    assert max(map(abs, errors)) < 0.065
    assert statistics.median(map(abs, errors)) < 0.03


def test_a_step_on_a_pipeline_has_the_bubble_among_its_parts() -> None:
    asked = {"model": "llama-3.1-70b", "gpu": "h100-sxm-80gb", "gpus": 64, "seq_len": 4096, "stage": 2, "recompute": "full"}
    deep = {count: job(**asked, pipeline_parallel=8, grad_accum=count) for count in (8, 64)}  # type: ignore[arg-type]
    parts = {}
    for count, one in deep.items():
        time = step_time(account_of(one, one.batch), one.model, one.recipe, one.mesh, one.batch, one.cluster)
        parts[count] = {part.name: part.seconds for part in time.parts}, time
    few, many = parts[8], parts[64]
    assert few[0]["pipeline bubble"] == pytest.approx(many[0]["pipeline bubble"])
    assert many[1].tokens_per_s > 1.5 * few[1].tokens_per_s
    assert many[1].tokens == 64 * 4096 / 8
    assert 0.3 < many[1].mfu < 0.6
    assert few[0]["reducing gradients"] > 0
    assert few[0]["sends between stages"] > 0


def test_stages_that_share_a_node_send_faster() -> None:
    asked = {"model": "llama-3.1-8b", "gpu": "h100-sxm-80gb", "seq_len": 4096, "grad_accum": 8, "pipeline_parallel": 4}
    seconds = []
    for gpus in (8, 64):
        one = job(**asked, gpus=gpus)  # type: ignore[arg-type]
        time = step_time(account_of(one, one.batch), one.model, one.recipe, one.mesh, one.batch, one.cluster)
        seconds.append(next(part.seconds for part in time.parts if part.name == "sends between stages"))
    assert seconds[0] < seconds[1] / 3
    assert estimate(job(**asked, gpus=8)).pipeline  # type: ignore[arg-type]


def _parts(**said: object) -> dict[str, float]:
    asked = {"model": "llama-3.1-8b", "gpu": "h100-sxm-80gb", "gpus": 16, "seq_len": 4096, "grad_accum": 8, "recompute": "full"}
    one = job(**asked, pipeline_parallel=2, **said)  # type: ignore[arg-type]
    time = step_time(account_of(one, one.batch), one.model, one.recipe, one.mesh, one.batch, one.cluster)
    return {part.name: float(part.seconds + part.hidden_s) for part in time.parts}


def test_offloaded_parameters_are_copied_once_or_for_every_gather() -> None:
    here, at_2, at_3 = _parts(), *(_parts(offload_optimizer="cpu", offload_param="cpu", stage=stage) for stage in (2, 3))
    copies = "copies to and from the host"
    assert at_3[copies] == pytest.approx(
        at_2[copies] * (1 + 1 + 8) / 2
    )  # the last rank gathers for one forward, then for every backward
    assert at_2["optimizer step"] > 5 * here["optimizer step"]


def test_inputs_of_blocks_are_copied_both_ways_in_every_micro_batch() -> None:
    away = _parts(offload_activations=True)["copies of activations"]
    assert away == pytest.approx(2 * 8 * 16 * 2 * 4096 * 4096 / pcie_bytes_per_s("hopper"))
