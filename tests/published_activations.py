"""Published closed forms for activations and states: Korthikanti et al. 2022, and section 3.2 of the ZeRO paper.

Tests compare them with the papers' printed figures, and with engines that have the same form.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zeroplan.numeric import Int, ceil_div

if TYPE_CHECKING:
    from zeroplan.spec.recipe import Recompute


def layer_activation_bytes(*, micro_batch: Int, seq_len: Int, hidden: Int, heads: Int) -> Int:
    """Activations one layer keeps for its backward pass, nothing recomputed or split. [bytes]

    34·s·b·h + 5·a·s²·b. Source: Korthikanti et al. 2022, arXiv:2205.05198, eq. 1, multiplied out.

    >>> layer_activation_bytes(micro_batch=1, seq_len=2048, hidden=12288, heads=96)
    2868903936
    """
    return 34 * seq_len * micro_batch * hidden + 5 * heads * seq_len * seq_len * micro_batch


def split_layer_activation_bytes(
    *,
    micro_batch: Int,
    seq_len: Int,
    hidden: Int,
    heads: Int,
    tp: Int,
    sequence_parallel: bool = False,
    recompute: Recompute = "none",
) -> Int:
    """Activations one layer keeps on one of ``tp`` tensor-parallel ranks, rounded up to whole bytes. [bytes]

    Tensor parallelism splits 24·s·b·h and the scores, 5·a·s²·b, and leaves 10·s·b·h (norms, dropouts and the inputs of both
    branches) whole; sequence parallelism splits those too. Selective recomputation drops the scores. Full recomputation
    keeps the input of the layer, 2·s·b·h, whole on every rank (the paper splits it in no row of its table 2).
    Source: Korthikanti et al. 2022, arXiv:2205.05198, eq. 2 (tensor), eq. 4 (and sequence), eq. 6 (and selective), table 2.

    >>> size = {"micro_batch": 1, "seq_len": 2048, "hidden": 12288, "heads": 96}
    >>> split_layer_activation_bytes(**size, tp=8)
    578813952
    >>> split_layer_activation_bytes(**size, tp=8, sequence_parallel=True, recompute="selective")
    106954752
    """
    hidden_elements = seq_len * micro_batch * hidden
    if recompute == "full":
        return 2 * hidden_elements
    scores = 0 if recompute == "selective" else 5 * heads * seq_len * seq_len * micro_batch
    if sequence_parallel:
        return ceil_div(34 * hidden_elements + scores, tp)
    return 10 * hidden_elements + ceil_div(24 * hidden_elements + scores, tp)


def first_stage_activation_bytes(layer_bytes: int, *, layers: int, pipeline_stages: int = 1, interleave: int = 1) -> int:
    """Activations on the first pipeline stage, which holds as many micro-batches as there are stages. [bytes]

    L times one layer, whatever the number of stages; an interleaved schedule with ``interleave`` chunks per stage adds
    (p - 1)/(p·m) of it, rounded up here. Source: Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.3 and eq. 5.

    >>> first_stage_activation_bytes(1000, layers=96, pipeline_stages=8, interleave=3)
    124000
    """
    whole = layer_bytes * layers
    if interleave == 1:
        return whole
    return whole + ceil_div(whole * (pipeline_stages - 1), pipeline_stages * interleave)


def parameter_and_optimizer_bytes(*, hidden: int, layers: int, tp: int = 1, pipeline_stages: int = 1) -> int:
    """Weights, gradients and Adam state of the layers on one GPU at 18 bytes per parameter. [bytes]

    18 · 12·L·h² / (t·p): fp16 weights, fp32 gradients, fp32 weights and two moments. Embeddings, biases and norms left out.
    Source: Korthikanti et al. 2022, arXiv:2205.05198, figure 1.

    >>> parameter_and_optimizer_bytes(hidden=6144, layers=48, tp=8) / 2**30
    45.5625
    """
    return ceil_div(18 * 12 * layers * hidden * hidden, tp * pipeline_stages)


def zero_activation_bytes(*, hidden: Int, layers: Int, seq_len: Int, batch: Int) -> Int:
    """Activations of a GPT-2-like model by the ZeRO paper's rule of thumb. [bytes]

    12 · hidden · batch · seq · layers elements of 2 bytes; scores left out.
    Source: Rajbhandari et al. 2020, arXiv:1910.02054, section 3.2 ("about 60 GB" for GPT-2 1.5B at batch 32).

    >>> zero_activation_bytes(hidden=1600, layers=48, seq_len=1024, batch=32)
    60397977600
    """
    return 2 * 12 * hidden * batch * seq_len * layers
