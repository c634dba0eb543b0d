"""Compares linear attention's kernels with published times of fla's, and Mamba-2's with the rate of a public kernel."""

from __future__ import annotations

from dataclasses import replace
from statistics import median

import pytest

from zeroplan import BatchSpec, job
from zeroplan.catalog.gpu import gpu
from zeroplan.job_time import time_of
from zeroplan.steptime.products import Machine, Passes
from zeroplan.steptime.scans import _GATED_DELTA, _KIMI_DELTA, Rule, Scan, moving, scan_of, scanning
from zeroplan.steptime.tables import table_of
from zeroplan.transformer.flops import linear_attention_flops

#: FlashQLA's benchmark on an H200 (github.com/QwenLM/FlashQLA at 6e5d2ea1, benchmark/benchmark_results_H200.txt): tokens of a
#: sequence, sequences, heads of values, and the times of fla 0.5.1. [ms] Heads are 128 wide.
FORWARDS = [
    (32768, 1, 8, 0.902), (16384, 1, 8, 0.455), (8192, 1, 8, 0.234), (16384, 2, 8, 0.611), (8192, 4, 8, 0.467), (4096, 8, 8, 0.471),
    (32768, 1, 16, 1.241), (8192, 1, 16, 0.316), (8192, 4, 16, 0.935), (32768, 1, 32, 1.885), (8192, 1, 32, 0.466),
    (4096, 1, 32, 0.244), (32768, 1, 64, 3.331), (8192, 1, 64, 0.814), (4096, 1, 64, 0.417), (8192, 1, 24, 0.391),
    (32768, 1, 48, 2.711),
]  # fmt: skip
BACKWARDS = [
    (8192, 1, 32, 1.444), (32768, 1, 32, 5.697), (8192, 1, 16, 0.957), (32768, 1, 16, 3.701), (32768, 1, 8, 2.743),
    (8192, 1, 8, 0.722), (32768, 1, 4, 2.311),
]  # fmt: skip
#: Helion's benchmark on a B200 (github.com/pytorch/helion at 3e928d1e, examples/linear/BENCHMARKS.md): sequences, tokens, heads,
#: their width, fla's forward, and its forward and backward. [ms]
GATED = [
    (1, 8192, 96, 128, 1.204, 5.388), (2, 16384, 16, 128, 0.925, 4.072), (4, 4096, 64, 128, 1.517, 6.945),
    (8, 2048, 32, 256, 1.958, 9.168),
]  # fmt: skip
KIMI = [(1, 8192, 96, 128, 2.241, 11.204), (2, 16384, 16, 128, 1.609, 7.777), (4, 4096, 64, 128, 2.925, 14.615)]


def machine(name: str) -> Machine:
    card = gpu(name)
    peak = card.dense_flops_per_s["bf16"].value
    return Machine(table_of(card.name, card.architecture), "bf16", peak, 0.8 * card.memory_bandwidth_bytes_per_s.value, 1.0)


def took(name: str, tokens: int, sequences: int, heads: int, rule: Rule | None, width: int = 128) -> Passes:
    scan = Scan(1.0 * tokens * sequences, tokens, heads, width, width, 64, heads, 1.0, rule)
    return Passes(*(1e3 * one for one in scanning(scan, machine(name))))


def test_the_gated_delta_rule_takes_as_long_as_on_an_h200():
    """Seven of the times gave the constants. The rest were held out: single sequences, and other numbers of heads."""
    forward = [took("h200", *size, _GATED_DELTA).forward / ms - 1 for *size, ms in FORWARDS]
    backward = [took("h200", *size, _GATED_DELTA).backward / ms - 1 for *size, ms in BACKWARDS]
    assert median(map(abs, forward)) < 0.06
    assert max(map(abs, forward)) < 0.16
    assert median(map(abs, backward)) < 0.06
    assert max(map(abs, backward)) < 0.16


@pytest.mark.parametrize(("rule", "sizes"), [(_GATED_DELTA, GATED), (_KIMI_DELTA, KIMI)])
def test_other_gpus_take_about_as_long(rule: Rule, sizes: list[tuple]):
    """Heads of 256 are predicted up to half too slow."""
    for sequences, tokens, heads, width, forward, both in sizes:
        found = took("b200", tokens, sequences, heads, rule, width)
        assert found.forward / forward == pytest.approx(1, abs=0.22 if width == 128 else 0.51)
        assert (found.forward + found.backward) / both == pytest.approx(1, abs=0.11 if width == 128 else 0.35)


def test_few_heads_wait_for_the_state():
    """A long sequence of few heads takes longer than several short ones; many heads hide it."""
    assert took("h200", 32768, 1, 8, _GATED_DELTA).forward > 1.8 * took("h200", 4096, 8, 8, _GATED_DELTA).forward
    assert took("h200", 32768, 1, 64, _GATED_DELTA).forward == pytest.approx(took("h200", 4096, 8, 64, _GATED_DELTA).forward)


def test_mamba_is_bound_by_its_states_and_never_beats_its_products():
    """Tilelang's kernel of the output alone takes 0.645 ms: 8 x 4,096 tokens, 80 heads, H800 (its benchmark/mamba2/README.md)."""
    scan = Scan(8 * 4096.0, 4096, 80, 128, 64, 256, 1, 1.0, None)
    found = scanning(scan, machine("h800"))
    assert 0.645e-3 < found.forward < 4 * 0.645e-3
    assert found.backward > 2 * found.forward


@pytest.mark.parametrize(("name", "rule"), [("qwen3-next-80b-a3b", _GATED_DELTA), ("granite-4.0-h-small", None)])
def test_the_recurrences_of_a_hybrid_model(name: str, rule: Rule | None):
    """Twice the sequences take twice as long. The old rate, that of large products, would be several times as high."""
    model = job(model=name, gpu="h200", gpus=8, engine="fsdp2").model
    one, two = (
        scan_of(model, BatchSpec(seq_len=8192, micro_batch_size=size, grad_accum_steps=1), tp=1, cp=1) for size in (1, 2)
    )
    assert one is not None
    assert two is not None
    assert (one.rule, two.tokens) == (rule, 2 * one.tokens)
    first, second = scanning(one, machine("h200")), scanning(two, machine("h200"))
    assert second.forward == pytest.approx(2 * first.forward, rel=0.1)
    at_the_rate_of_large_products = linear_attention_flops(model) * 8192 / 650e12
    assert first.forward > 1.5 * at_the_rate_of_large_products


@pytest.mark.parametrize(("name", "channels"), [
    ("qwen3-next-80b-a3b", 2 * 16 * 128 + 32 * 128), ("kimi-linear-48b-a3b", 3 * 32 * 128), ("granite-4.0-h-small", 8192 + 2 * 128),
])  # fmt: skip
def test_the_convolution_before_a_recurrence_reads_and_writes_its_channels(name: str, channels: int):
    """causal-conv1d reads and writes two bytes per channel and token, and its backward reads two tensors and writes one."""
    model = job(model=name, gpu="h200", gpus=8, engine="fsdp2").model
    scan = scan_of(model, BatchSpec(seq_len=8192, micro_batch_size=1, grad_accum_steps=1), tp=1, cp=1)
    assert scan is not None
    moved = moving(scan)
    assert scan.channels == channels
    assert (moved.forward, moved.backward) == (4 * channels * 8192 * scan.layers, 6 * channels * 8192 * scan.layers)


def test_transformers_own_gated_delta_rule_takes_many_times_as_long_as_flas():
    """With 4,096 tokens it moves 44 kB per token and head forward and 580 kB backward: each of 64 chunks adds up whole gradients.

    The loop launches 9 kernels per chunk and layer.
    """
    of = job(model="qwen3-next-80b-a3b", gpu="h200", gpus=8, engine="fsdp2", linear_attention="torch")
    batch = BatchSpec(seq_len=4096, micro_batch_size=1, grad_accum_steps=1)
    kernels, torchs = (scan_of(of.model, batch, tp=1, cp=1, in_torch=own) for own in (False, True))
    assert kernels is not None
    assert torchs is not None
    ran, moved, pairs = machine("h200"), moving(torchs._replace(channels=0.0)), torchs.layers * torchs.tokens * torchs.heads
    assert moved.forward / pairs == pytest.approx(152 * 128 + 92 * 128 + 64 * 64 + 32 * 128 * 128 / 64)
    assert moved.backward / pairs == pytest.approx(2 * moved.forward / pairs + 16 * 64 * (4 * 128 + 64))
    assert moved.kernels == torchs.layers * (46 + 64 * 9)
    assert moved.forward / ran.bandwidth > 5 * scanning(kernels, ran).forward
    assert moved.backward / ran.bandwidth > 20 * scanning(kernels, ran).backward
    assert time_of(of).seconds > time_of(replace(of, recipe=replace(of.recipe, linear_attention="kernels"))).seconds
