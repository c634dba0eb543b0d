"""The time of linear attention: the gated delta rule and Kimi's, as fla runs them, Mamba-2's scan, and their convolutions.

fla's kernels multiply small tiles in Triton, at a tenth of the rate of large products, and take as long on Hopper as on Blackwell.
So their time is measured, by token, head and operation. A state passes from chunk to chunk, which takes a latency for every
chunk of a sequence: few heads wait for it. No kernel is faster than reading and writing its tensors. Mamba-2's products have their
true shapes; its times are read from the code, not measured. So are those of transformers' own code of the gated delta rule, whose
operators each read and write memory. Leaves out its own code of Kimi's rule and of Mamba-2, which takes as long as their kernels
here.
"""

from typing import NamedTuple

from zeroplan.numeric import Float, longest
from zeroplan.spec.batch import Batch
from zeroplan.spec.model import ModelSpec
from zeroplan.steptime.pointwise import Moved
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


#: Families whose linear attention has no convolution.
_WITHOUT_CONVOLUTION = ("minimax",)
#: A depthwise convolution with SiLU, per channel and token. causal-conv1d's kernel reads and writes once; its backward reads the
#: input and a gradient, and writes one (causal-conv1d 1.7, causal_conv1d_interface.py). In torch SiLU runs apart (read, not run).
_CONVOLUTION, _CONVOLUTION_IN_TORCH = Moved(4, 6, 1, 1), Moved(8, 14, 2, 3)


class Scan(NamedTuple):
    """The recurrences of one micro-batch on one GPU."""

    tokens: Float
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
    channels: float = 0.0
    """Channels of the convolution before a recurrence."""
    in_torch: bool = False
    """transformers' own code of the gated delta rule runs, not fla's."""


def scan_of(model: ModelSpec, batch: Batch, *, tp: int, cp: int, in_torch: bool = False) -> Scan | None:
    """Return the recurrences of a micro-batch; None for a model without linear attention.

    ``in_torch``: without the kernels of fla, mamba_ssm and causal-conv1d.
    """
    if model.linear is None or not linear_attention_flops(model):
        return None
    own, mamba = model.linear, bool(model.layer_pattern) and model.family != "kimi_linear"
    layers = sum(model.letters.count(one) for one in "MHN") if mamba else model.num_hidden_layers - attention_layers(model)
    tokens, sequence = 1.0 * batch.micro_batch_size * batch.seq_len / cp, float(batch.seq_len) / cp
    rule = None if mamba else _KIMI_DELTA if model.family == "kimi_linear" else _GATED_DELTA
    chunk = own.chunk_size if mamba else CHUNK
    groups = max(1.0, own.num_key_heads / tp)
    channels = 2 * own.num_key_heads * own.key_head_dim + own.num_value_heads * own.value_head_dim
    return Scan(
        tokens, sequence, own.num_value_heads / tp, own.key_head_dim, own.value_head_dim, chunk, groups, layers, rule,
        0.0 if model.family in _WITHOUT_CONVOLUTION else channels / tp, in_torch=in_torch and rule is _GATED_DELTA,
    )  # fmt: skip


def scanning(scan: Scan, on: Machine) -> Passes:
    """Return the time of the recurrences' forward and backward; of transformers' own code only its products. [s]"""
    if scan.in_torch:
        forward = scan.layers * scan.tokens * scan.heads * _rule_flops(scan) / (on.share * on.peak)
        return Passes(forward, 2.0 * forward)
    return _of_mamba(scan, on) if scan.rule is None else _of_rule(scan, scan.rule, on)


def _rule_flops(scan: Scan) -> float:
    """Return the operations of a gated delta rule per token and head, forward. [FLOPs]"""
    keys, values = scan.keys, scan.values
    return scan.chunk * (5 * keys + 3 * values) + 6 * keys * values


#: fp32 elements that each operator of transformers' gated delta rule reads and writes in the forward, in bytes per token and head:
#: per width of keys and of values, per token of a chunk, and per element of the state and chunk. Both first have copies of keys and
#: queries for every head, casts, lengths, padding, products and the loop over chunks (transformers 5.23,
#: models/qwen3_next/modeling_qwen3_next.py, ``torch_chunk_gated_delta_rule``; read, not run).
_TORCH_KEYS, _TORCH_VALUES, _TORCH_PAIRS, _TORCH_STATES = 152.0, 92.0, 64.0, 32.0
#: Kernels of that forward before and after the loop, and of one chunk; a backward has as many for each input as for the output.
_TORCH_KERNELS, _TORCH_CHUNK_KERNELS, _TORCH_CHUNK_BACKWARD_KERNELS = 46.0, 9.0, 30.0
#: The backward of a slice of one chunk writes zeros for all chunks and adds them to the gradient so far (torch 2.13,
#: tools/autograd/derivatives.yaml, ``select``). Each chunk slices three tensors as wide as keys, one as values and its pairs.
_SLICED = 16.0


def moving(scan: Scan) -> Moved:
    """Return the bytes and kernels of the convolutions, and of transformers' own code of the recurrences."""
    convolution = _CONVOLUTION_IN_TORCH if scan.in_torch else _CONVOLUTION
    per_token = Moved().plus(convolution, scan.tokens * scan.channels)
    total = Moved(*(scan.layers * each for each in per_token)) if scan.channels else Moved()
    return total.and_of(_in_torch(scan)) if scan.in_torch else total


def _in_torch(scan: Scan) -> Moved:
    keys, values, pairs, chunks = scan.keys, scan.values, scan.layers * scan.tokens * scan.heads, scan.sequence / scan.chunk
    each = _TORCH_KEYS * keys + _TORCH_VALUES * values + _TORCH_PAIRS * scan.chunk + _TORCH_STATES * keys * values / scan.chunk
    sliced = _SLICED * chunks * (3 * keys + values + scan.chunk)
    return Moved(
        pairs * each, pairs * (2.0 * each + sliced), scan.layers * (_TORCH_KERNELS + chunks * _TORCH_CHUNK_KERNELS),
        scan.layers * (2.0 * _TORCH_KERNELS + chunks * _TORCH_CHUNK_BACKWARD_KERNELS),
    )  # fmt: skip


def _of_rule(scan: Scan, rule: Rule, on: Machine) -> Passes:
    keys, values, pairs = scan.keys, scan.values, scan.layers * scan.tokens * scan.heads
    work = _rule_flops(scan) / (scan.chunk * 8 * _WIDE + 6 * _WIDE**2)
    moved = 2 * (4 * keys + 7 * values + 2 * keys * values / scan.chunk + scan.chunk) / on.bandwidth
    chunks = scan.layers * scan.sequence / scan.chunk

    def took(each: float, latency: float, least: float) -> Float:
        whole = pairs * max(work * each, least)
        return (1 - rule.serial) * whole + longest(rule.serial * whole, chunks * latency)

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
    return Passes(longest(forward, moved), longest(again + 2 * forward, 2 * moved))
