"""The backend for real GPUs, tested without one: its whole flow on CPU tensors, with made-up counts of the allocator."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.verify.watching.test_tracker import job
from zeroplan import __version__
from zeroplan.measurement import BlocksMeasured, CardMeasured, Measurement, PhaseMeasured
from zeroplan.spec.mesh import MeshSpec
from zeroplan.spec.recipe import RecipeSpec

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = pytest.mark.torch

STEPS = 2


class Scripted:
    """A fake card: each phase peaks 1,000 bytes above the one before."""

    device = "cpu"

    def __init__(self) -> None:
        self.phases = 0

    def synchronize(self) -> None: ...

    def forget_peaks(self) -> None: ...

    def counted(self, seconds: float) -> tuple[BlocksMeasured, int]:
        self.phases += 1
        peak = 1000 * self.phases
        blocks = BlocksMeasured(
            allocated_bytes=peak, requested_bytes=peak - 1, active_bytes=peak + 1, reserved_bytes=peak + 2, seconds=seconds
        )
        return blocks, peak // 2

    def figures(self) -> CardMeasured:
        return CardMeasured(name="scripted", total_bytes=10**6, used_bytes=10**5, outside_bytes=10**4)

    def words(self) -> str:
        return "scripted"

    def settings(self) -> str:
        return "default"


@pytest.fixture(scope="module")
def measured() -> Measurement:
    import torch.distributed as dist
    from torch.distributed import HashStore

    from zeroplan.verify.backends.cuda import measured_on_gpu
    from zeroplan.verify.watching.group import join

    case = job(batch=replace(job().batch, grad_accum_steps=2))
    log = join("fake", HashStore(), rank=0, ranks=case.mesh.world_size, timeout_s=60)
    try:
        return measured_on_gpu(
            case, None, rank=0, transport="fake", log=log, steps=STEPS, say=lambda _: None, gpu=Scripted()  # type: ignore[arg-type]
        )  # fmt: skip
    finally:
        dist.destroy_process_group()


def test_more_steps_are_taken_than_are_watched(measured: Measurement):
    assert len(measured.steps) == STEPS + 3
    assert [phase.phase for phase in measured.steady.phases] == ["forward", "backward", "optimizer step"]


def test_each_phase_has_the_allocators_highest_peak_of_all_micro_batches(measured: Measurement):
    """Initialisation is one phase. A step has five: two forwards, two backwards and the optimizer step."""
    before = 1 + (STEPS + 2) * 5
    peaks = [1000 * (before + phase) for phase in (3, 4, 5)]
    assert [phase.peak_bytes for phase in measured.steady.phases] == peaks
    assert [phase.blocks.reserved_bytes for phase in measured.steady.phases if phase.blocks] == [peak + 2 for peak in peaks]
    assert measured.steady.held_bytes == peaks[-1] // 2
    (shown,) = measured.allocator
    assert (shown.allocated_bytes, shown.reserved_bytes, shown.modelled) == (peaks[-1], peaks[-1] + 2, False)
    assert shown.workspace_bytes == 0  # matrix products on a CPU keep no workspace


def test_attention_kernels_and_the_date_are_recorded(measured: Measurement):
    assert measured.attention is not None
    assert [name.removeprefix("aten::_scaled_dot_product_") for name in measured.attention.operators] == [
        "flash_attention_for_cpu", "flash_attention_for_cpu_backward",
    ]  # fmt: skip
    assert measured.environment.date.count("-") == 2
    assert measured.environment.packages["zeroplan"] == __version__  # also when it runs from source


def test_library_memory_is_recognised_by_its_caller_and_lifetime():
    from zeroplan.verify.watching.allocations import Allocation, Timeline
    from zeroplan.verify.watching.libraries import attention_of, kept_by_products

    backward = ("autograd", "aten::_scaled_dot_product_cudnn_attention_backward")
    seen = Timeline()
    seen.allocations = [
        Allocation(1, 32, 0xA, 0, ("aten::linear", "aten::mm")),  # a workspace, never freed
        Allocation(2, 8, 0xB, 0, (*backward, "aten::empty")),  # dq, which outlives the kernel
        Allocation(3, 100, 0xC, 0, backward),
        Allocation(4, 50, 0xD, 0, (*backward, "aten::empty")),
        Allocation(5, -50, 0xD, 0, backward),
        Allocation(6, -100, 0xC, 0, backward),
        Allocation(7, 70, 0xC, 0, backward),  # scratch of another layer
        Allocation(8, -70, 0xC, 0, backward),
        Allocation(9, 16, 0xE, 0, ("aten::mm",)),  # a gradient: its owner is known, see below
        Allocation(10, -8, 0xB, 0, ("autograd",)),
    ]
    attention = attention_of(seen)
    assert attention is not None
    assert (attention.operators, attention.scratch_bytes) == ((backward[1],), 150)
    assert kept_by_products(seen.alive(10), frozenset({0xE})) == 32
    assert attention_of(Timeline()) is None


def test_kinds_at_the_unwatched_peak_are_those_of_the_step_before(measured: Measurement):
    assert measured.steps[-1].peak.kinds == measured.steps[-2].peak.kinds != {}
    assert any("unwatched" in remark for remark in measured.remarks)


def test_an_unwatched_step_with_another_peak_is_reported(measured: Measurement):
    assert "the unwatched step peaked +5,000 bytes from the one before it" in measured.remarks


def test_the_collectives_are_those_of_one_step(measured: Measurement):
    calls = {(one.operation, one.phase): one.calls for one in measured.collectives}
    assert calls["all_gather", "forward"] > 0
    assert calls["reduce_scatter", "backward"] == 2 * (job().model.num_hidden_layers + 1)


def test_times_of_all_micro_batches_add_up(measured: Measurement):
    assert measured.steady.seconds is not None
    assert measured.steady.seconds > 0


def test_a_module_on_meta_gets_this_ranks_shard_and_tied_weights_stay_tied():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from zeroplan.verify.backends.cuda import model_for
    from zeroplan.verify.training.fsdp2 import Fsdp2

    case = job(tied=True)
    torch.distributed.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    try:
        work = model_for(case, "cpu")
        assert next(work.module.parameters()).is_meta
        assert work.batch["input_ids"].device.type == "cpu"
        Fsdp2(work, case.recipe, init_device_mesh("cpu", (4,)))
        weights = list(work.module.parameters())
        assert all(isinstance(weight, DTensor) and weight.to_local().abs().max() < 1 for weight in weights)
        assert work.module.lm_head.weight is work.module.model.embed_tokens.weight
        assert all(bool(torch.isfinite(buffer).all()) for buffer in work.module.buffers())
    finally:
        torch.distributed.destroy_process_group()


ENTRY = {
    "pg_id": 0, "pg_name": ["0", "default_pg"], "profiling_name": "nccl:_all_gather_base", "time_created_ns": 2_000,
    "duration_ms": 1.5, "input_sizes": [[128]], "input_dtypes": ["BFloat16"], "output_sizes": [[1024]],
    "output_dtypes": ["BFloat16"],
}  # fmt: skip


def test_flight_recorder_entries_become_collectives():
    from zeroplan.verify.watching.log import Log
    from zeroplan.verify.watching.nccl import calls_of

    log = Log()
    log._since += [(1_000, "3:forward"), (3_000, "3:backward")]
    bracket = ENTRY | {"profiling_name": "nccl:coalesced", "time_created_ns": 2_500}
    reduced = ENTRY | {
        "profiling_name": "nccl:all_reduce", "time_created_ns": 3_500, "duration_ms": None, "output_sizes": [[128]], "pg_id": 1,
        "pg_name": ["5f2a", "mesh_replicate"],
    }  # fmt: skip
    groups = {"0": {"name": "0", "ranks": "[0, 1, 2, 3, 4, 5, 6, 7]"}, "5f2a": {"name": "5f2a", "ranks": "[0, 4]"}}
    gathered, summed = calls_of({"entries": [ENTRY, bracket, reduced], "pg_config": groups}, log)
    assert gathered == ("all_gather", "bfloat16", 8, 2048, "3:forward", 0.0015)
    assert summed == ("all_reduce", "bfloat16", 2, 256, "3:backward", None)


def test_the_allocators_settings_are_read_from_its_configuration():
    from zeroplan.verify.backends.gpu import settings_of

    assert [settings_of(one) for one in ("", "expandable_segments:True", "a:1,expandable_segments: true")] == [
        "default", "expandable_segments", "expandable_segments",
    ]  # fmt: skip


def test_a_record_of_a_gpu_is_read_back():
    from dataclasses import asdict

    from zeroplan.spec.base import read

    blocks = BlocksMeasured(allocated_bytes=3, requested_bytes=2, active_bytes=4, reserved_bytes=5, seconds=0.25)
    phase = PhaseMeasured(phase="forward", peak_bytes=3, kinds={}, blocks=blocks)
    assert read(PhaseMeasured, asdict(phase), where="record") == phase


@pytest.mark.parametrize("engine", ["ddp"])
def test_other_engines_are_built_on_the_device_with_numbers_in_their_weights(engine: str):
    from zeroplan.verify.backends.cuda import model_for

    case = replace(job(), recipe=RecipeSpec(engine=engine, zero_stage=0), mesh=MeshSpec(dp_shard=2))  # type: ignore[arg-type]
    weights = list(model_for(case, "cpu").module.parameters())
    assert all(not weight.is_meta and weight.abs().max() < 1 for weight in weights)


def test_a_snapshot_is_written_however_the_run_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from zeroplan.verify.backends.gpu import Gpu

    said: list[tuple[object, ...]] = []
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **options: said.append(tuple(options.items())))
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", lambda path: Path(path).write_text(f"after {len(said)}"))
    path = tmp_path / "new" / "it.snapshot.pickle"
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError), Gpu().remembered(path):
            raise torch.OutOfMemoryError
    assert said == [(("stacks", "python"), ("max_entries", 1_000_000)), (("enabled", None),)] * 2
    found = {one.name: one.read_text() for one in path.parent.iterdir()}
    assert found == {"it.snapshot.pickle": "after 1", "it-2.snapshot.pickle": "after 3"}


def test_selective_recomputation_keeps_the_output_of_whichever_kernel_attention_has():
    """Torch's flash and memory-efficient kernels, and cuDNN's, which torch prefers on Hopper and Blackwell."""
    from types import SimpleNamespace

    from torch.utils.checkpoint import CheckpointPolicy

    from zeroplan.verify.training.recomputation import every_second_product

    policy, now = every_second_product(), SimpleNamespace(is_recompute=False)
    for kernel in ("flash", "efficient", "cudnn"):
        operator = getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}_attention").default
        assert policy(now, operator) is CheckpointPolicy.MUST_SAVE
