"""The pretended GPU: what it shows is what fake CPU tensors show, but for differences that have names."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.verify.watching.test_tracker import FSDP2
from zeroplan.ledger import Phase

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = pytest.mark.torch

#: Not larger: numbers of AdamW's steps, in host memory beside a GPU, and the random state that CUDA's flash attention saves.
A_FEW_NUMBERS = 16
OTHER_KERNELS = {
    "llama, fp32": "attention in 32 bits takes another kernel on CUDA, and with grouped heads the one that makes all scores",
    "gpt2": "a layer norm keeps its statistics in fp32 on CUDA",
    "gpt2, recomputed": "a layer norm keeps its statistics in fp32 on CUDA",
}


def peaks(name: str, device: str) -> dict[tuple[int, Phase], int]:
    from zeroplan.verify.pretended.card import install
    from zeroplan.verify.training.run import run
    from zeroplan.verify.watching.recording import Recording
    from zeroplan.verify.watching.timeline import Timeline
    from zeroplan.verify.watching.tracker import Tracker

    install()
    tracker = Tracker(device=device)
    run(FSDP2[name], tracker, device=device)
    seen = tracker.recording
    timeline = Timeline(replace(seen, blocks=[block for block in seen.blocks if block.n_bytes > A_FEW_NUMBERS]))
    assert isinstance(timeline.recording, Recording)
    return {(span.step, span.phase): timeline.peak(index)[0] for index, span in enumerate(seen.spans) if span.step >= 0}


@pytest.mark.parametrize("name", [name for name in FSDP2 if name not in OTHER_KERNELS])
def test_it_shows_what_fake_cpu_tensors_show(name: str):
    assert peaks(name, "card") == peaks(name, "cpu")


def test_a_layer_norm_keeps_its_statistics_in_fp32():
    on_card, on_cpu = peaks("gpt2", "card"), peaks("gpt2", "cpu")
    spec, batch = FSDP2["gpt2"].model, FSDP2["gpt2"].batch
    tokens, norms = batch.micro_batch_size * batch.seq_len, 2 * spec.num_hidden_layers + 1
    assert on_card[1, Phase.FORWARD] - on_cpu[1, Phase.FORWARD] == 2 * norms * tokens * (4 - 2)


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
    from zeroplan.verify.pretended.card import kernel

    query, key, value = (
        torch.empty(1, count, 16, size, dtype=getattr(torch, dtype), device="meta")
        for count, size in ((heads[0], sizes[0]), (heads[1], sizes[0]), (heads[1], sizes[1]))
    )
    assert kernel(query, key, value, torch.empty(16, 16, device="meta") if mask else None) == chosen


def test_heads_are_padded_to_eight_and_given_back():
    from torch._subclasses.fake_tensor import FakeTensorMode

    from zeroplan.verify.pretended.card import decisions, install

    install()
    with decisions(), FakeTensorMode():
        query = torch.empty(1, 4, 16, 20, dtype=torch.bfloat16, device="card", requires_grad=True)
        out = torch.nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True)
        out.sum().backward()
    assert out.shape == query.shape == query.grad.shape
