"""Expert parallelism, simulated with transformers' dispatch and FSDP2 on two meshes: the run is as estimated."""

from __future__ import annotations

import pytest

from tests.expert_jobs import JOBS, expert_job, expert_model
from zeroplan.comparison import compare_with_estimate
from zeroplan.errors import MeasurementError
from zeroplan.spec.job import JobSpec

torch = pytest.importorskip("torch")
pytest.importorskip("transformers.distributed.expert_parallel")
pytestmark = pytest.mark.torch

#: Bytes that the estimate leaves out: scalars per layer and step (the loss, random states of kernels, counts of tokens).
_NUMBERS = 1_600


@pytest.mark.parametrize("name", JOBS)
def test_the_run_takes_what_is_estimated(name: str) -> None:
    """The loop of the run holds the batch during the optimizer step, too, and positions beside tensor parallelism.

    The estimate counts them there only with context parallelism.
    """
    from tests.simulated import simulate

    job = JOBS[name]
    compared = compare_with_estimate(simulate(job))
    mesh = job.mesh
    batch = 8 * job.batch.seq_len * (job.batch.micro_batch_size + (mesh.tp > 1)) if mesh.cp == 1 else 0
    for phase in compared.phases:
        held = batch if phase.what == "optimizer step" else 0
        assert abs(phase.difference + held) < _NUMBERS, phase
    assert abs(compared.peak.difference) < _NUMBERS + batch, compared.peak
    assert not [row for row in compared.collectives if row.difference]


def test_fake_tensors_take_what_real_ones_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake group moves nothing, so the test evens out what a real rank would receive and what its routers choose."""
    from transformers.distributed import expert_parallel
    from transformers.models.mixtral import modeling_mixtral

    from zeroplan.verify.training import experts

    job = expert_job(model=expert_model(layers=2), batch=(1, 32, 1))
    fake = _peaks(job, fake=True)
    counts, highest = expert_parallel.all_to_all_single, torch.topk

    def even_counts(got: torch.Tensor, sent: torch.Tensor, group: object) -> None:
        counts(got, sent, group=group)
        got.fill_(sent.sum().item() // sent.numel())

    def even_choice(scores: torch.Tensor, k: int, dim: int) -> object:
        values, indices = highest(scores, k, dim=dim)
        indices.data.copy_((torch.arange(indices.numel()) % scores.shape[-1]).view_as(indices))
        return values, indices

    monkeypatch.setattr(experts, "FakeTensor", torch.Tensor)
    monkeypatch.setattr(expert_parallel, "all_to_all_single", even_counts)
    monkeypatch.setattr(modeling_mixtral, "torch", _Instead(topk=even_choice))
    assert _peaks(job, fake=False) == fake


class _Instead:
    """The module ``torch`` with some functions replaced."""

    def __init__(self, **others: object) -> None:
        self._others = others

    def __getattr__(self, name: str) -> object:
        return self._others.get(name) or getattr(torch, name)


def _peaks(job: JobSpec, *, fake: bool) -> list[int]:
    """Return every phase's peak, without the wrappers around results of collectives, which take no memory of their own."""
    from zeroplan.verify.training.run import run
    from zeroplan.verify.watching.timeline import Timeline
    from zeroplan.verify.watching.tracker import Tracker

    tracker = Tracker()
    run(job, tracker, fake=fake)
    recording = tracker.recording
    recording.blocks[:] = [block for block in recording.blocks if "_wrap_tensor" not in block.operation]
    timeline = Timeline(recording)
    return [timeline.peak(at)[0] for at in range(len(recording.spans))]


def test_real_tensors_are_refused() -> None:
    from zeroplan.verify.training.run import run
    from zeroplan.verify.watching.tracker import Tracker

    with pytest.raises(MeasurementError, match="use --backend simulate"):
        run(expert_job(), Tracker(), fake=False)
