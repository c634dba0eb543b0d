"""The time of linear attention's kernels: the gated delta rule and Kimi's, as fla runs them, and Mamba-2's scan.

fla's kernels multiply small tiles in Triton, at a tenth of the rate of large products, and take as long on Hopper as on Blackwell.
So their time is measured, by token, head and operation. A state passes from chunk to chunk, which takes a latency for every
chunk of a sequence: few heads wait for it. No kernel is faster than reading and writing its tensors. Mamba-2's products have their
true shapes; its times are read from the code, not measured. Leaves out transformers' own code in torch, which is slower.
"""

from typing import NamedTuple

from zeroplan.spec.batch import BatchSpec
from zeroplan.spec.model import ModelSpec
from zeroplan.steptime.products import Machine, Passes, Product, seconds
from zeroplan.transformer.families.widths import CHUNK
from zeroplan.transformer.flops import attention_layers, linear_attention_flops

SOURCE = "github.com/QwenLM/FlashQLA at 6e5d2ea1, benchmark/benchmark_results_H200.txt: kernels of fla 0.5.1"


class Rule(NamedTuple):
    """How long a recurrence's kernels take."""

    forward: float
    backward: float
    """Both: a token and head with keys and values of 128; with other widths in proportion to the operations. [s]"""
    chunk_forward: float = 1.2e-6
    chunk_backward: float = 3.6e-6
    """Both: the latency with which a chunk passes its state on. [s]"""
    serial: float = 0.35
    """Share of the kernels' time in which states pass on."""


#: Several sequences with 8 to 64 heads of values on an H200; one sequence gave the latency. GB200 takes as long within 12 %, a
#: B200 1.4 to 1.8 and 5.2 to 6.0 ns (github.com/pytorch/helion at 3e928d1e, examples/linear/BENCHMARKS.md).
_GATED_DELTA = Rule(1.75e-9, 5.55e-9)
#: The same benchmark of helion on a B200, with 64 and 96 heads. The latency is taken from the gated delta rule.
_KIMI_DELTA = Rule(2.8e-9, 11.3e-9)
#: The backward reads and writes 2.5 times as many elements as the forward. The forward's kernels move for a token and head, with D
#: for keys' and I for values' width: 4·D + 7·I, a state of D·I per chunk twice, and the triangular system (fla 0.6, the calls in
#: ops/gated_delta_rule/chunk.py).
_BACKWARD_MOVED = 2.5
_WIDE = 128


class Scan(NamedTuple):
    """The recurrences of one micro-batch on one GPU."""

    tokens: float
    sequence: float
    """Tokens of a sequence on this rank."""
    heads: float
    """Heads of values."""
    keys: float
    values: float
    """Both: widths of a head."""
    chunk: float
    groups: float
    layers: float
    rule: Rule | None
    """None for Mamba-2."""


def scan_of(model: ModelSpec, batch: BatchSpec, *, tp: int, cp: int) -> Scan | None:
    """Return the recurrences of a micro-batch; None for a model without linear attention."""
    if model.linear is None or not linear_attention_flops(model):
        return None
    own, mamba = model.linear, bool(model.layer_pattern) and model.family != "kimi_linear"
    layers = sum(model.letters.count(one) for one in "MHN") if mamba else model.num_hidden_layers - attention_layers(model)
    tokens, sequence = 1.0 * batch.micro_batch_size * batch.seq_len / cp, 1.0 * batch.seq_len / cp
    rule = None if mamba else _KIMI_DELTA if model.family == "kimi_linear" else _GATED_DELTA
    chunk = own.chunk_size if mamba else CHUNK
    groups = max(1.0, own.num_key_heads / tp)
    return Scan(tokens, sequence, own.num_value_heads / tp, own.key_head_dim, own.value_head_dim, chunk, groups, layers, rule)


def scanning(scan: Scan, on: Machine) -> Passes:
    """Return the time of the recurrences' forward and backward. [s]"""
    return _of_mamba(scan, on) if scan.rule is None else _of_rule(scan, scan.rule, on)


def _of_rule(scan: Scan, rule: Rule, on: Machine) -> Passes:
    keys, values, pairs = scan.keys, scan.values, scan.layers * scan.tokens * scan.heads
    work = (scan.chunk * (5 * keys + 3 * values) + 6 * keys * values) / (scan.chunk * 8 * _WIDE + 6 * _WIDE**2)
    moved = 2 * (4 * keys + 7 * values + 2 * keys * values / scan.chunk + scan.chunk) / on.bandwidth
    chunks = scan.layers * scan.sequence / scan.chunk

    def took(each: float, latency: float, least: float) -> float:
        whole = pairs * max(work * each, least)
        return (1 - rule.serial) * whole + max(rule.serial * whole, chunks * latency)

    return Passes(
        took(rule.forward, rule.chunk_forward, moved), took(rule.backward, rule.chunk_backward, _BACKWARD_MOVED * moved)
    )


def _of_mamba(scan: Scan, on: Machine) -> Passes:
    """Return the time of mamba_ssm's kernels (2.3, ops/triton/ssd_combined.py), each a product of the shape of its tiles.

    Forward: the states of chunks, scores of B and C by group, the output of a chunk's own tokens and of the state before it.
    Backward: scores and states again, and two products for each of the forward's.
    """
    rows, by_group = scan.heads, scan.groups
    states = Product(scan.values, scan.chunk, scan.layers, rows * scan.keys / scan.chunk, frozen=True)
    scores = Product(scan.chunk, scan.keys, scan.layers, by_group, frozen=True)
    own = Product(scan.values, scan.chunk, scan.layers, rows, frozen=True)
    before = Product(scan.values, scan.keys, scan.layers, rows, frozen=True)
    forward = seconds((states, scores, own, before), scan.tokens, on, accumulates=False).forward
    again = seconds((states, scores), scan.tokens, on, accumulates=False).forward
    state = 2 * scan.heads * scan.keys * scan.values / scan.chunk
    # Bytes: the states are written in fp32 and read again in 16 bits; x and the output; B and C; fp32 scores of every group.
    elements = 5 * state + 4 * scan.heads * scan.values + 4 * by_group * scan.keys + 4 * by_group * scan.chunk
    moved = 2.0 * scan.layers * scan.tokens * elements / on.bandwidth
    return Passes(max(forward, moved), max(again + 2 * forward, 2 * moved))
