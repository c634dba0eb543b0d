"""The fake GPU shows the same bytes as fake CPU tensors, except where CUDA has named other kernels. Its autocast is CUDA's."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from tests.simulated import on_the_fake_gpu, simulate
from tests.transformer.tiny_configs import tiny_config
from tests.verify.watching.test_tracker import FSDP2
from zeroplan.catalog.config import model_from_config
from zeroplan.comparison import compare_with_estimate
from zeroplan.ledger import Phase
from zeroplan.spec.batch import BatchSpec
from zeroplan.spec.job import JobSpec
from zeroplan.spec.mesh import MeshSpec
from zeroplan.spec.recipe import RecipeSpec, Recompute

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = pytest.mark.torch

#: Blocks up to this size are ignored: AdamW's step counters, in host memory beside a GPU, and flash attention's random state.
A_FEW_NUMBERS = 16
OTHER_KERNELS = {
    "llama, fp32": "attention in 32 bits takes another kernel on CUDA, and with grouped heads the one that makes all scores",
    "gpt2": "a layer norm keeps its statistics in fp32 on CUDA",
    "gpt2, recomputed": "a layer norm keeps its statistics in fp32 on CUDA",
}


def peaks(name: str, device: str) -> dict[tuple[int, Phase], int]:
    return on_the_fake_gpu(_peaks, name, device)


def _peaks(name: str, device: str) -> dict[tuple[int, Phase], int]:
    from zeroplan.verify.fake_cuda.installed import install_node
    from zeroplan.verify.training.run import run
    from zeroplan.verify.watching.recording import Recording
    from zeroplan.verify.watching.timeline import Timeline
    from zeroplan.verify.watching.tracker import Tracker

    install_node()
    tracker = Tracker(device=device)
    run(FSDP2[name], tracker, device=device)
    seen = tracker.recording
    timeline = Timeline(replace(seen, blocks=[block for block in seen.blocks if block.n_bytes > A_FEW_NUMBERS]))
    assert isinstance(timeline.recording, Recording)
    return {(span.step, span.phase): timeline.peak(index)[0] for index, span in enumerate(seen.spans) if span.step >= 0}


@pytest.mark.parametrize("name", [name for name in FSDP2 if name not in OTHER_KERNELS])
def test_the_fake_gpu_shows_the_same_bytes_as_fake_cpu_tensors(name: str):
    assert peaks(name, "cuda") == peaks(name, "cpu")


def test_a_layer_norm_keeps_its_statistics_in_fp32():
    on_gpu, on_cpu = peaks("gpt2", "cuda"), peaks("gpt2", "cpu")
    spec, batch = FSDP2["gpt2"].model, FSDP2["gpt2"].batch
    tokens, norms = batch.micro_batch_size * batch.seq_len, 2 * spec.num_hidden_layers + 1
    assert on_gpu[1, Phase.FORWARD] - on_cpu[1, Phase.FORWARD] == 2 * norms * tokens * (4 - 2)


@pytest.mark.parametrize(("dtype", "heads", "sizes", "mask", "chosen"), [
    ("bfloat16", (8, 2), (64, 64), False, "flash"),
    ("bfloat16", (8, 8), (64, 64), True, "efficient"),
    ("bfloat16", (8, 8), (192, 128), False, "efficient"),
    ("bfloat16", (8, 8), (288, 288), False, "efficient"),
    ("float32", (8, 8), (64, 64), False, "efficient"),
    ("float32", (8, 2), (64, 64), False, "math"),
])  # fmt: skip
def test_attention_takes_the_kernel_that_cuda_takes(
    dtype: str, heads: tuple[int, int], sizes: tuple[int, int], mask: bool, chosen: str
):
    from zeroplan.verify.fake_cuda.attention import kernel

    query, key, value = (
        torch.empty(1, count, 16, size, dtype=getattr(torch, dtype), device="meta")
        for count, size in ((heads[0], sizes[0]), (heads[1], sizes[0]), (heads[1], sizes[1]))
    )
    assert kernel(query, key, value, torch.empty(16, 16, device="meta") if mask else None) == chosen


def test_a_head_size_that_is_no_multiple_of_eight_comes_back_unpadded():
    shape, back = on_the_fake_gpu(_attend, 20)
    assert shape == back == (1, 4, 16, 20)


def _attend(size: int) -> tuple[tuple[int, ...], ...]:
    from torch._subclasses.fake_tensor import FakeTensorMode

    from zeroplan.verify.fake_cuda.attention import decisions
    from zeroplan.verify.fake_cuda.installed import install_node

    install_node()
    with decisions(), FakeTensorMode():
        query = torch.empty(1, 4, 16, size, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        out = torch.nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True)
        out.sum().backward()
    return tuple(out.shape), tuple(query.grad.shape)


def test_rms_norm_is_cudas_fused_kernel_and_channel_shuffle_is_not_native():
    """Only for these two operators does a CPU build of torch 2.13 choose otherwise than a CUDA build."""
    norm, shuffle = on_the_fake_gpu(_operators)
    assert norm == ["aten._fused_rms_norm.default"]
    assert "aten.native_channel_shuffle.default" not in shuffle


def _operators() -> tuple[list[str], list[str]]:
    from torch._subclasses.fake_tensor import FakeTensorMode

    from zeroplan.verify.fake_cuda.installed import install_node
    from zeroplan.verify.watching.tracker import Tracker

    install_node()
    norm, shuffle = Tracker(device="cuda"), Tracker(device="cuda")
    with FakeTensorMode(), torch.device("cuda"):
        x, weight = torch.empty(4, 64, dtype=torch.bfloat16), torch.empty(64, dtype=torch.bfloat16)
        with norm:
            torch.nn.functional.rms_norm(x, (64,), weight)
        with shuffle:
            torch.channel_shuffle(torch.empty(1, 8, 4, 4), 2)
    of_norm, of_shuffle = (sorted({block.operation for block in one.recording.blocks}) for one in (norm, shuffle))
    return of_norm, of_shuffle


def test_autocast_casts_a_weight_once_and_with_cudas_lists():
    casts, dtypes = on_the_fake_gpu(_cast)
    assert casts == 1
    assert dtypes == ["bfloat16", "bfloat16", "float32", "float32", "bfloat16", "float32"]


def _cast() -> tuple[int, list[str]]:
    from torch._subclasses.fake_tensor import FakeTensorMode

    from zeroplan.verify.fake_cuda.installed import install_node
    from zeroplan.verify.watching.tracker import Tracker

    install_node()
    tracker = Tracker(device="cuda")
    with FakeTensorMode(), tracker, torch.device("cuda"):
        weight, bits = torch.empty(8, 8, requires_grad=True), torch.empty(2, 8, dtype=torch.bfloat16)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            results = [
                bits @ weight, bits @ weight, bits.exp(), bits.softmax(0), bits.softmax(0, dtype=torch.bfloat16),
                torch.addcmul(weight, bits[:1], bits[:1]),
            ]  # fmt: skip
    casts = [block for block in tracker.recording.blocks if block.n_bytes == 8 * 8 * 2 and block.died is not None]
    return len(casts), [str(one.dtype).removeprefix("torch.") for one in results]


@pytest.mark.parametrize(("family", "recompute"), [
    ("llama", "none"), ("llama", "full"), ("gpt2", "none"), ("gemma3_text", "none"), ("mixtral", "none"),
])  # fmt: skip
def test_a_run_under_autocast_takes_what_is_estimated(family: str, recompute: Recompute):
    job = JobSpec(
        model=replace(model_from_config(tiny_config(family)), num_hidden_layers=2),
        recipe=RecipeSpec(engine="ddp", zero_stage=0, precision="bf16-mixed", recompute=recompute),
        mesh=MeshSpec(dp_shard=2),
        batch=BatchSpec(micro_batch_size=8, seq_len=64),
    )
    found = compare_with_estimate(simulate(job, steps=3))
    assert abs(found.peak.error) < 0.0005, found
    assert found.peak.measured > 0


def test_a_cuda_build_keeps_its_version():
    """With another version, torchvision refuses to be imported."""
    code = """
import torch
torch.version.cuda = "13.0"
from zeroplan.verify.fake_cuda.torch_cuda import _CUDA_VERSION
print(_CUDA_VERSION)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "13.0\n"


def test_fake_tensors_touch_no_device_where_cuda_is_said_to_be_there():
    """Those of torch 2.11 first make a real tensor on the device (``torch/_subclasses/fake_tensor.py``, ``init_gpu_context``)."""
    on_the_fake_gpu(_asked_for_a_context)


def _asked_for_a_context() -> None:
    from torch._subclasses import fake_tensor

    from zeroplan.verify.fake_cuda.installed import install_node

    install_node()
    assert torch.cuda.is_available()
    fake_tensor.init_gpu_context(torch.device("cuda"))
    assert not hasattr(fake_tensor.init_gpu_context, "cache_info"), "it is torch's own"
