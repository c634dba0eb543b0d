"""What a rank reports if it has no GPU, or not enough of one. Torch, the driver and nvidia-smi are faked."""

import sys
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch

from tests.measured_twins import twin
from zeroplan.errors import MeasurementError
from zeroplan.estimator import estimate
from zeroplan.resolve import job
from zeroplan.verify.backends import gpu_ready
from zeroplan.verify.backends.gpu_ready import Holder, Memory, ready
from zeroplan.verify.failures import NotHereError, cause_of, text_of
from zeroplan.verify.processes.rank import _await_all, measure
from zeroplan.verify.task import Task

pytestmark = pytest.mark.torch
GB = 10**9
TASK = Task(job=job(model="llama-3.2-1b", gpus=8, stage=3, gpu="h100"), transport="fake", tensors="cuda")
NEEDED = estimate(TASK.job).least_bytes
MEMORY_OF = gpu_ready.memory_of


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A node with one idle H100."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for name, found in (
        ("built_for_gpus", lambda: True), ("count", lambda: 1), ("why_none", lambda: ""), ("name_of", lambda _: "NVIDIA H100"),
        ("memory_of", lambda _: Memory(79 * GB, 80 * GB)), ("holders", lambda _: []),
    ):  # fmt: skip
        monkeypatch.setattr(gpu_ready, name, found)
    return monkeypatch


@pytest.mark.usefixtures("card")
def test_a_free_card_is_taken():
    assert ready(TASK) == ("NVIDIA H100", 80 * GB)


TOO_OLD = "The NVIDIA driver on your system is too old (found version 11040). Please update your GPU driver by downloading"
NO_DRIVER = "Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU and installed a driver from"


@pytest.mark.parametrize(("names", "transport", "said"), [
    ({"built_for_gpus": lambda: False}, "fake", "is built without CUDA"),
    ({"count": lambda: 0, "why_none": lambda: NO_DRIVER.partition(". ")[0]}, "fake",
     "torch finds no GPU here: Found no NVIDIA driver on your system; use --backend simulate"),
    ({"count": lambda: 0, "why_none": lambda: TOO_OLD}, "fake", "the NVIDIA driver is too old: it supports CUDA 11.4, and"),
    ({"count": lambda: 4}, "nccl", "8 ranks on this node need 8 GPUs, and it has 4; start fewer"),
    ({"memory_of": lambda _: Memory(2 * GB, 80 * GB)}, "fake", "GPU 0 is busy: 2.00 GB of 80.00 GB are free"),
    ({"memory_of": lambda _: Memory(2 * GB, 80 * GB), "holders": lambda _: [Holder(77, "python", 78 * GB)]}, "fake",
     "it is held by python (pid 77) 78.00 GB"),
])  # fmt: skip
def test_each_problem_is_reported_in_one_line(card: pytest.MonkeyPatch, names: dict[str, Any], transport: Any, said: str):
    for name, found in names.items():
        card.setattr(gpu_ready, name, found)
    card.setenv("LOCAL_WORLD_SIZE", "8")
    card.setattr(gpu_ready, "_LEAVES_S", 0.1)
    with pytest.raises(NotHereError) as refused:
        ready(replace(TASK, transport=transport))
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("memory", [
    Memory(NEEDED, 80 * GB),  # other processes hold some, and enough is left
    Memory(NEEDED - GB // 2 - 1, NEEDED - 1),  # nearly idle but too small: the run will end out of memory, which is a result
])  # fmt: skip
def test_a_card_is_not_called_busy_if_others_do_not_matter(card: pytest.MonkeyPatch, memory: Memory):
    card.setattr(gpu_ready, "memory_of", lambda _: memory)
    assert ready(TASK)[1] == memory.total


def test_a_process_that_has_just_ended_gets_time_to_free_its_memory(card: pytest.MonkeyPatch):
    seen = iter([Memory(GB, 80 * GB), Memory(79 * GB, 80 * GB)])
    card.setattr(gpu_ready, "memory_of", lambda _: next(seen))
    assert ready(TASK)[1] == 80 * GB


def test_a_driver_that_is_too_old_is_reported_although_nvml_counts_gpus(card: pytest.MonkeyPatch):
    def set_device(_: int) -> None:
        raise RuntimeError(TOO_OLD)

    card.setattr(gpu_ready, "memory_of", MEMORY_OF)
    card.setattr(torch.cuda, "set_device", set_device)
    with pytest.raises(
        NotHereError, match=r"^the NVIDIA driver is too old: it supports CUDA 11\.4, and this torch was built for"
    ):
        ready(TASK)


def test_a_failing_card_is_reported_in_its_drivers_words(card: pytest.MonkeyPatch):
    def set_device(_: int) -> None:
        raise RuntimeError("CUDA error: uncorrectable ECC error encountered\nCUDA kernel errors might be reported later")

    card.setattr(gpu_ready, "memory_of", MEMORY_OF)
    card.setattr(torch.cuda, "set_device", set_device)
    with pytest.raises(NotHereError, match=r"^GPU 0 cannot be used: CUDA error: uncorrectable ECC error encountered$"):
        ready(TASK)


def test_the_drivers_reason_is_its_first_sentence(monkeypatch: pytest.MonkeyPatch):
    def init() -> None:
        raise RuntimeError(NO_DRIVER)

    monkeypatch.setattr(torch.cuda, "init", init)
    assert gpu_ready.why_none() == "Found no NVIDIA driver on your system"


def test_a_rank_that_never_joins_is_named():
    store = torch.distributed.HashStore()
    store.set("zeroplan/joined/2", "")
    with pytest.raises(MeasurementError, match=r"rank 1, 3 of 4 did not join within 0\.2 s"):
        _await_all(store, rank=0, ranks=4, timeout_s=0.2)


def test_a_rank_on_a_gpu_calls_the_gpu_module(card: pytest.MonkeyPatch):
    """The arguments of the call, the context's bytes and the card's name. The module itself is faked, since it needs a GPU."""
    asked: dict[str, Any] = {}
    played = ModuleType("zeroplan.verify.backends.cuda")

    def measured_on_gpu(job: Any, make: Any, **others: Any) -> Any:
        asked.update(others, job=job, make=make)
        return twin()

    played.measured_on_gpu = measured_on_gpu  # type: ignore[attr-defined]
    card.setitem(sys.modules, "zeroplan.verify.backends.cuda", played)
    card.setattr("zeroplan.verify.watching.group.join", lambda *_, **__: "log")
    outside = iter([500, 600])  # after the CUDA context is made, and after the group is joined
    card.setattr("zeroplan.verify.backends.gpu.outside_bytes", lambda: next(outside))
    card.setattr(torch.cuda, "init", lambda: None)
    card.setattr(torch.cuda, "synchronize", lambda: None)
    card.setattr(torch.distributed, "destroy_process_group", lambda: None)
    told: list[object] = []
    threads = torch.get_num_threads()
    try:
        assert measure(TASK, rank=0, say=print, card=lambda *of: told.append(of)) == twin()
    finally:
        torch.set_num_threads(threads)
        card.setenv("DS_ACCELERATOR", "cpu")
    assert told == [("NVIDIA H100", 80 * GB)]
    assert (asked["gpu"].context_bytes, asked["gpu"].joined_bytes) == (500, 600)
    assert {name: asked[name] for name in ("rank", "transport", "log", "steps", "make")} == {
        "rank": 0, "transport": "fake", "log": "log", "steps": 3, "make": None,
    }  # fmt: skip


def test_running_out_of_memory_is_distinguished_from_other_failures():
    on_a_card = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.\nGPU 0 has 139.80 GiB")
    assert cause_of(on_a_card) == "memory"
    assert text_of(on_a_card) == "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has 139.80 GiB"
    assert cause_of(RuntimeError("CUDA error: an illegal memory access was encountered")) == "engine"
    nccl = torch.distributed.DistBackendError(
        "NCCL error in: /p/NCCLUtils.cpp:94, unhandled cuda error (run with NCCL_DEBUG=INFO for details), NCCL version 2.27.3\n"
        "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 999 'unknown error'"
    )
    assert (cause_of(nccl), text_of(nccl)) == (
        "engine", "NCCL 2.27.3: unhandled cuda error: Cuda failure 999 'unknown error'; set NCCL_DEBUG=INFO for details",
    )  # fmt: skip
    assert cause_of(torch.distributed.DistBackendError("Cuda failure 2 'out of memory'")) == "memory"
