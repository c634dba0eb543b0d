"""Pictures show the estimate, to the byte. Needs no matplotlib."""

import subprocess
import sys
from dataclasses import replace

import pytest

from tests.measured_twins import twin
from zeroplan import JobSpec, SpecError, estimate, job
from zeroplan.comparison import compare_with_estimate
from zeroplan.estimator import replayed_if_tight
from zeroplan.ledger import bytes_by_kind
from zeroplan.measurement import CourseMeasured, Measurement
from zeroplan.planner.asking import Question, ask
from zeroplan.report.palette import OUTSIDE
from zeroplan.report.series.heat import heat
from zeroplan.report.series.pareto import pareto
from zeroplan.report.series.scaling import scaling
from zeroplan.report.series.stages import STAGES, at_stage, stages
from zeroplan.report.series.timeline import timeline
from zeroplan.report.series.validation import validation
from zeroplan.resolve import Request

JOBS = {
    "fsdp2": job(model="llama-3.1-8b", gpus=8, gpu="h100", seq_len=8192),
    "hsdp": job(model="llama-3.1-8b", gpus=16, replicas=2, gpu="h100", recompute="full"),
    "moe": job(model="mixtral-8x7b", gpus=8, gpu="h200", recompute="full"),
    "deepspeed": job(model="llama-3.1-8b", gpus=8, engine="deepspeed", stage=2, offload_optimizer="cpu", gpu="a100-sxm-80gb"),
    "params": job(params="7e9", gpus=8),
    "one GPU": job(model="gpt2", gpu="t4"),
}
each_job = pytest.mark.parametrize("asked", JOBS.values(), ids=JOBS)


@each_job
def test_the_bands_of_a_stage_are_the_lines_at_its_peak(asked: JobSpec):
    for column in stages(asked).columns:
        if column.refusal:
            with pytest.raises(SpecError, match=column.refusal.partition("(")[0][:40]):
                estimate(at_stage(asked, column.stage))
            continue
        answer = estimate(at_stage(asked, column.stage))
        bands = {part.what: part.n_bytes for part in column.parts}
        assert bands.pop(OUTSIDE) == answer.outside_band.expected_bytes
        assert bands == {kind.value: n_bytes for kind, n_bytes in bytes_by_kind(answer.peak.lines).items() if n_bytes}
        assert sum(part.n_bytes for part in column.parts) == column.needed_bytes == answer.least_bytes
        assert (column.moment, column.verdict) == (answer.peak.name, answer.verdict)


@each_job
def test_the_jobs_own_stage_is_the_job_itself(asked: JobSpec):
    assert at_stage(asked, asked.recipe.zero_stage) == asked
    assert [at_stage(asked, stage).mesh.world_size for stage in STAGES] == [asked.mesh.world_size] * 4


@each_job
def test_a_timeline_is_every_moment_in_the_order_of_the_step(asked: JobSpec):
    found, answer = timeline(asked), estimate(asked)
    highest_of = {moment.name: max(m.total_bytes for m in answer.moments if m.name == moment.name) for moment in answer.moments}
    assert {instant.name: instant.total_bytes for instant in found.instants} == highest_of
    assert len(found.instants) == len(highest_of)
    assert all(sum(part.n_bytes for part in instant.parts) == instant.total_bytes for instant in found.instants)
    highest = found.instants[found.peak]
    assert (highest.name, highest.total_bytes) == (answer.peak.name, answer.peak_bytes)
    phases = list(dict.fromkeys(instant.phase for instant in found.instants))
    assert phases == [one for one in ("initialisation", "forward", "backward", "optimizer step") if one in phases]
    assert len(
        [at for at in range(1, len(found.instants)) if found.instants[at].phase != found.instants[at - 1].phase]
    ) + 1 == len(phases)


def test_a_record_lies_over_the_moments_of_its_phases():
    record = twin(factor=0.97)
    found = timeline(record.job, record)
    assert {one.phase: one.n_bytes for one in found.measured} == {
        phase.phase: phase.peak_bytes for phase in record.steady.phases
    }
    for one in found.measured:
        assert {found.instants[at].phase for at in range(one.first, one.last + 1)} == {one.phase}
    assert (
        max(i.total_bytes for i in found.instants if i.phase != "initialisation")
        == compare_with_estimate(record).peak.predicted
    )


def with_courses(record: Measurement, *, forward: CourseMeasured, backward: CourseMeasured) -> Measurement:
    courses = {"forward": forward, "backward": backward}
    phases = tuple(replace(phase, course=courses.get(phase.phase)) for phase in record.steady.phases)
    return replace(record, steps=(replace(record.steady, phases=phases),))


def course(*blocks: int) -> CourseMeasured:
    return CourseMeasured(before_bytes=7, blocks=blocks, after_bytes=9)


@pytest.mark.parametrize(("asked", "levels"), [
    ({"model": "gpt2", "gpus": 4, "stage": 3},
     [("forward: unsharding block 1 of 12", "forward of block 1 of 12", 0, ()),
      ("forward: unsharding block 2 of 12", "forward of block 2 of 12", 1, ()),
      ("forward: unsharding block 11 of 12", "forward of block 11 of 12", 10, tuple(range(2, 10))),
      ("forward: unsharding block 12 of 12", "forward of block 12 of 12", 11, ()), ("loss, forward", "loss, forward", 9, ()),
      ("backward of the loss", "backward of the final norm", 7, ()),
      ("backward: unsharding block 12 of 12", "backward: reducing block 12 of 12", 111, ()),
      ("backward: unsharding block 11 of 12", "backward: reducing block 11 of 12", 110, ()),
      ("backward: unsharding block 2 of 12", "backward: reducing block 2 of 12", 101, tuple(range(109, 101, -1))),
      ("backward: unsharding block 1 of 12", "backward: reducing block 1 of 12", 100, ()),
      ("backward of the embedding", "backward: root group reduced", 9, ())]),
    ({"model": "gpt2", "gpus": 4, "stage": 0},
     [("forward of the last block", "forward of the last block", 11, ()), ("forward of the loss", "forward of the loss", 9, ()),
      ("backward of the loss", "backward of the final norm", 7, ()),
      ("backward of the last block: second MLP projection", "backward of the last block: norm before attention", 111, ()),
      ("backward of the first block: second MLP projection", "backward of the first block: norm before attention", 100,
       tuple(range(110, 100, -1))),
      ("backward of the embedding: transformer.wpe.weight", "backward of the embedding", 9, ())]),
    ({"model": "gpt2", "gpus": 4, "engine": "deepspeed", "stage": 3},
     [("forward of a block", "forward of a block", 11, ()), ("forward of the final norm", "loss forward", 9, ()),
      ("backward of the loss", "backward of the final norm", 7, ()),
      ("backward of a block: second MLP projection", "backward of a block: norm before attention", 111, ()),
      ("gathered for the backward before the blocks: transformer.wpe.weight", "end of backward: last bucket reduced", 9, ())]),
], ids=["FSDP2", "DDP", "DeepSpeed"])  # fmt: skip
def test_a_run_lies_over_the_moments_of_its_blocks(
    asked: dict[str, object], levels: list[tuple[str, str, int, tuple[int, ...]]]
):
    record = with_courses(twin(**asked), forward=course(*range(12)), backward=course(*range(100, 112)))
    found = timeline(record.job, record)
    names = [instant.name for instant in found.instants]
    assert [(names[one.first], names[one.last], one.n_bytes, one.skipped) for one in found.levels] == levels
    assert "the highest of each block" in found.caption.lines[-1]


def test_a_block_that_the_run_has_not_got_has_no_level():
    record = with_courses(twin(model="gpt2", gpus=4, stage=3), forward=course(1, 2), backward=course())
    assert [one.n_bytes for one in timeline(record.job, record).levels] == [1, 2, 9]


def test_a_record_of_another_job_is_refused_with_what_differs():
    record = twin()
    with pytest.raises(SpecError, match=r"record 'r' is of another job [(]stage 1 instead of 0, seq-len 128 instead of 256"):
        timeline(job(model="gpt2", gpus=4, stage=0, engine="ddp", seq_len=256), record, where="record 'r'")
    with pytest.raises(SpecError, match="another model"):
        timeline(job(model="llama-2-7b", gpus=4, stage=1, engine="ddp", seq_len=128), record)


def test_a_record_of_the_same_job_by_another_name_is_taken():
    record = twin()
    asked = replace(
        record.job, model=replace(record.job.model, name="mine"), recipe=replace(record.job.recipe, optimizer_impl="foreach")
    )
    assert timeline(asked, record).measured


@each_job
def test_scaling_is_the_job_on_other_numbers_of_gpus(asked: JobSpec):
    found = scaling(asked)
    assert found.own.needed_bytes == estimate(asked).least_bytes
    for line in found.lines:
        for point in line.points[::4]:
            shards = point.gpus // (asked.mesh.dp_replicate * asked.mesh.tp)
            there = at_stage(replace(asked, mesh=replace(asked.mesh, dp_shard=shards)), line.stage)
            assert there.mesh.world_size == point.gpus
            assert estimate(there).least_bytes == point.needed_bytes


def test_where_a_stage_begins_to_fit_one_gpu_fewer_does_not():
    asked = JOBS["fsdp2"]
    begins = {line.stage: line.fits_from for line in scaling(asked).lines}
    assert begins[0] is None
    assert begins[3] is not None
    for gpus, fits in ((begins[3].gpus, True), (begins[3].gpus - 1, False)):
        assert estimate(replace(asked, mesh=replace(asked.mesh, dp_shard=gpus))).fits is fits


@each_job
def test_a_map_of_batches_is_its_jobs(asked: JobSpec):
    found = heat(asked)
    assert asked.batch.seq_len in found.seq_lens
    assert asked.batch.micro_batch_size in found.micro_batches
    for row in (0, 3, len(found.micro_batches) - 1):
        for column in (0, len(found.seq_lens) // 2, len(found.seq_lens) - 1):
            batch = replace(asked.batch, micro_batch_size=found.micro_batches[row], seq_len=found.seq_lens[column])
            answer = estimate(replace(asked, batch=batch))
            assert found.needed_bytes[row][column] == answer.least_bytes
            assert found.comfortable_bytes[row][column] == answer.comfortable_bytes
            assert (found.verdict(row, column) != "does not fit") is (replayed_if_tight(answer).fits is not False)


def test_a_plan_is_every_layout_near_the_gpus_memory():
    plan = ask(Request(model="llama-3.1-8b", gpus=8, gpu="h100", seq_len=4096), Question(global_batch=64))
    found = pareto(plan)
    assert plan.cloud is not None
    assert found.capacity_bytes == estimate(plan.best.layout.job).capacity_bytes  # type: ignore[union-attr]
    sizes = plan.cloud.layouts.least_bytes
    assert plan.cloud.layouts.layouts == plan.evaluated
    assert sum(spot.layouts for spot in found.spots) == int((sizes <= 1.3 * found.capacity_bytes).sum())
    fitting = sum(spot.layouts for spot in found.spots if spot.verdict != "does not fit")
    assert fitting == int((sizes <= found.capacity_bytes).sum())
    assert found.best is not None
    assert (found.best.needed_bytes, found.best.tokens_per_s) == plan.best.layout[1:5:3]  # type: ignore[union-attr]
    rates, needs = [one.tokens_per_s for one in found.front], [one.needed_bytes for one in found.front]
    assert (rates, needs) == (sorted(rates, reverse=True), sorted(needs, reverse=True))
    assert len(found.knees) == 2
    assert set(found.knees) <= set(found.front[1:-1])


@pytest.mark.parametrize(("trained", "words"), [
    ({"lora_rank": 16}, ("llama-3.1-8b with LoRA of rank 16", "adapters in all-linear")),
    ({"lora_rank": 8, "lora_targets": "attention", "quantize": "nf4"}, ("with QLoRA (nf4) of rank 8", "adapters in attention")),
    ({"freeze": "embedding", "freeze_layers": 4}, ("llama-3.1-8b with frozen parts", "frozen: embedding, the first 4 blocks")),
], ids=["LoRA", "QLoRA", "frozen"])  # fmt: skip
def test_every_picture_names_what_is_trained(trained: dict[str, object], words: tuple[str, ...]):
    asked = job(model="llama-3.1-8b", gpus=1, gpu="h100", seq_len=1024, **trained)
    shown = [stages(asked), timeline(asked), scaling(asked), heat(asked)]
    if "freeze" not in trained:  # which the planner does not search
        plan = ask(Request(model="llama-3.1-8b", gpus=1, gpu="h100", seq_len=1024, **trained), Question())
        shown.append(pareto(plan))
    for series in shown:
        assert all(one in series.caption.lines[0] for one in words), series.caption.lines[0]


def test_a_run_of_adapters_is_named_as_one():
    record = twin(model="llama-3.2-1b", gpus=2, stage=3, lora_rank=8)
    (run,) = validation([(record, compare_with_estimate(record))], limits=(0.02,)).runs
    assert run.name.startswith("llama-3.2-1b with LoRA of rank 8, ")


def test_where_nothing_fits_the_closest_are_shown():
    found = pareto(ask(Request(model="llama-3.1-405b", gpus=1, gpu="l4-24gb"), Question()))
    assert (found.best, found.front) == (None, ())
    assert {spot.verdict for spot in found.spots} == {"does not fit"}
    assert "nothing fits" in found.caption.lines[1]


def test_learned_positions_end_the_map():
    assert heat(JOBS["one GPU"]).seq_lens[-1] == 1024


def test_runs_are_named_and_told_by_engine():
    records = [twin(factor=0.5), twin(factor=2.0)]
    found = validation([(one, compare_with_estimate(one)) for one in records], limits=(0.02,))
    assert [round(run.error, 3) for run in found.runs] == [1.0, -0.5]
    assert found.runs[0].name == "gpt2, ddp 1, N = 4"


def test_series_load_no_matplotlib():
    code = (
        "import sys\nfrom zeroplan import job\nfrom zeroplan.report import bars, series\n"
        "from zeroplan.report.series.stages import stages\n"
        "bars.stages_bars(stages(job(params='7e9', gpus=8)), width=80, signs=True)\n"
        "print(sorted({'torch', 'matplotlib', 'numpy', 'rich', 'typer'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"


def test_the_charts_judge_a_tight_job_as_estimate_does(monkeypatch: pytest.MonkeyPatch):
    """Its peak fits tightly; a replay of its requests runs out of memory."""
    one = job(model="llama-3.1-8b", gpus=52, gpu="h100", seq_len=8192, stage=2)
    assert estimate(one).verdict == "tight"
    assert stages(one).columns[2].verdict == "does not fit"
    monkeypatch.setattr("zeroplan.report.series.scaling._multiples", lambda _: [52])
    monkeypatch.setattr("zeroplan.report.series.heat._seq_lens", lambda _: (512, 8192))
    monkeypatch.setattr("zeroplan.report.series.heat._micro_batches", lambda _: (1, 2))
    assert heat(one).verdict(0, 1) == "does not fit"
    found = scaling(one)
    assert (found.own.verdict, found.lines[2].fits_words) == ("does not fit", "does not fit")
