"""A search computes only the bytes of pipeline ranks: they equal the lines of the full estimate, and bounds hold."""

from dataclasses import replace

import pytest

from zeroplan import JobSpec, job
from zeroplan.engines.pipeline import accounts, highest_of
from zeroplan.engines.pipeline.weighed import WeighedRank, Weigher, fullest
from zeroplan.memo import remembering
from zeroplan.planner.search import highest
from zeroplan.spec.batch import Numbers
from zeroplan.timeline import own_pools
from zeroplan.weights import total

SMALL = {"model": "llama-3.2-1b", "gpu": "a10-24gb", "seq_len": 2048}
JOBS = {
    "1f1b": {"gpus": 8, "pipeline_parallel": 4, "stage": 3, "grad_accum": 8},
    "1f1b, recomputed, split": {"gpus": 8, "pipeline_parallel": 2, "tensor_parallel": 4, "stage": 2, "recompute": "full",
                                "grad_accum": 4, "micro_batch": 4},
    "gpipe": {"gpus": 4, "pipeline_parallel": 4, "stage": 2, "pipeline_schedule": "gpipe", "grad_accum": 4},
    "interleaved": {"gpus": 16, "pipeline_parallel": 4, "stage": 3, "pipeline_schedule": "interleaved-1f1b",
                    "recompute": "selective", "grad_accum": 8, "micro_batch": 2},
    "four stages": {"gpus": 8, "pipeline_parallel": 2, "stage": 3, "pipeline_schedule": "interleaved-1f1b", "grad_accum": 4,
                    "pipeline_stages_per_rank": 4},
    "zero bubble": {"gpus": 8, "pipeline_parallel": 2, "stage": 2, "pipeline_schedule": "interleaved-zero-bubble", "grad_accum": 8},
    "v": {"gpus": 8, "pipeline_parallel": 4, "stage": 2, "pipeline_schedule": "zbv", "grad_accum": 8},
    "some recomputed": {"gpus": 8, "pipeline_parallel": 4, "stage": 2, "recompute": "full", "recompute_layers": 5,
                        "grad_accum": 8},
    "shared sequences": {"gpus": 8, "pipeline_parallel": 2, "context_parallel": 4, "stage": 3, "grad_accum": 4, "seq_len": 32768},
    "bf16": {"gpus": 8, "pipeline_parallel": 4, "stage": 2, "precision": "bf16", "grad_accum": 4},
    "offloaded": {"gpus": 8, "pipeline_parallel": 4, "stage": 3, "grad_accum": 4, "recompute": "full", "offload_activations": True},
    "adapted": {"gpus": 8, "pipeline_parallel": 4, "stage": 3, "grad_accum": 4, "lora_rank": 8},
    "adapted, interleaved": {"gpus": 8, "pipeline_parallel": 4, "stage": 3, "pipeline_schedule": "interleaved-1f1b", "lora_rank": 8,
                             "recompute": "full", "grad_accum": 8},
    "on the host": {"gpus": 8, "pipeline_parallel": 4, "stage": 3, "grad_accum": 4, "offload_optimizer": "cpu",
                    "offload_param": "cpu"},
    "frozen": {"gpus": 8, "pipeline_parallel": 4, "stage": 2, "grad_accum": 4, "freeze_layers": 2},
    "in chunks": {"gpus": 8, "pipeline_parallel": 4, "stage": 2, "grad_accum": 4, "loss": "chunked"},
    "experts": {"model": "qwen3-30b-a3b", "gpus": 16, "pipeline_parallel": 2, "expert_parallel": 8, "stage": 3, "grad_accum": 4},
}  # fmt: skip


def weigher_of(asked: JobSpec) -> tuple[Weigher, Numbers]:
    batch = asked.batch
    numbers = Numbers(batch.micro_batch_size, batch.seq_len, batch.grad_accum_steps)
    return Weigher(asked.model, asked.recipe, asked.mesh, own_pools(asked.recipe)), numbers


@pytest.fixture(scope="module", params=JOBS)
def asked(request: pytest.FixtureRequest) -> JobSpec:
    return job(**{**SMALL, **JOBS[request.param]})


def test_each_ranks_bytes_are_the_sum_of_its_lines(asked: JobSpec):
    """This holds for the peak and each pool, with fresh and with cached stages and passes."""
    every = accounts(asked.model, asked.recipe, asked.mesh, asked.batch)
    with remembering():
        weigher, numbers = weigher_of(asked)
        again, _ = weigher_of(asked)
        for account in every:
            rank = account.pipeline[0].rank
            for one in (weigher, again):
                weighed = one.rank(rank, numbers)
                assert weighed.highest == highest(account.moments, asked.recipe)
                assert weighed.peak_bytes == account.pipeline[0].peak_bytes
    found = fullest(again.rank(one.pipeline[0].rank, numbers) for one in every)
    assert found.number == highest_of(every).pipeline[0].rank
    assert (found.exceeds(found.peak_bytes), found.exceeds(found.peak_bytes - 1)) == (False, True)


def test_bounds_answer_whether_a_rank_fits_before_its_peak_is_known(asked: JobSpec):
    """Their answer is the same as that of the peak."""
    peaks = [one.pipeline[0].peak_bytes for one in accounts(asked.model, asked.recipe, asked.mesh, asked.batch)]
    for share in (0.5, 0.9, 0.999, 1.001, 1.2, 3):
        weigher, numbers = weigher_of(asked)
        room = int(share * peaks[0])
        assert [weigher.rank(rank, numbers).exceeds(room) for rank in range(len(peaks))] == [peak > room for peak in peaks]
    least = [weigher.least_bytes(rank) for rank in range(len(peaks))]
    assert all(bound <= peak for bound, peak in zip(least, peaks, strict=True))
    assert all(least) is weigher.is_plain


def test_no_pass_is_above_its_bound(asked: JobSpec, monkeypatch: pytest.MonkeyPatch):
    """The test computes all kinds of passes, also those that a search skips."""
    monkeypatch.setattr("zeroplan.engines.pipeline.weighed._is_below", lambda *_, **__: False)
    weigher, numbers = weigher_of(asked)
    ranks = [weigher.rank(number, numbers) for number in range(asked.mesh.pp)]
    if not weigher.is_plain:  # such jobs have no bounds: their lines are added up
        assert all(rank.bound_bytes is None for rank in ranks)
        return
    compared = sum(_within_bounds(rank) for rank in ranks)
    assert (compared > 0) is (asked.mesh.ep == 1)


def _within_bounds(rank: WeighedRank) -> int:
    compared = 0
    for state in rank.states:
        stage = rank.worked[state.chunk]
        bound = None if stage.bounds is None else stage.bounds.of(state)
        taken = stage.taken(state)
        for found in (taken.highest, taken.at_the_loss):
            if bound is not None and found is not None:
                compared += 1
                assert found.peak_bytes <= total(bound)
                assert all(held <= most for held, most in zip(found.pools, bound, strict=True))
    return compared


def test_equal_peaks_are_those_of_the_first_rank(asked: JobSpec):
    weigher, numbers = weigher_of(asked)
    one = weigher.rank(0, numbers)
    twin = Weigher(asked.model, replace(asked.recipe), asked.mesh, own_pools(asked.recipe)).rank(0, numbers)
    assert fullest((one, twin)) is one
    assert fullest((twin, one)) is twin
