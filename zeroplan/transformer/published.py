"""What published closed forms say about activations: Korthikanti et al. 2022, and section 3.2 of the ZeRO paper.

Independent of the tensor-by-tensor account in ``activations``: 16-bit activations, one-byte dropout masks, scores kept,
an ungated MLP of four times the hidden width, and embeddings, final norm and logits left out.
"""

from zeroplan.ledger import Kind, Line
from zeroplan.numeric import Int, ceil_div
from zeroplan.spec.batch import Batch
from zeroplan.spec.mesh import Mesh
from zeroplan.spec.model import ModelSpec
from zeroplan.spec.recipe import Recompute

KORTHIKANTI = "Korthikanti et al. 2022, arXiv:2205.05198"


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


def megatron_layer_lines(
    model: ModelSpec, mesh: Mesh, batch: Batch, *, sequence_parallel: bool, recompute: Recompute
) -> tuple[Line, ...]:
    """Return what Korthikanti's closed form says one layer of ``model`` keeps on one rank.

    The model's own MLP width, grouped heads and gating do not enter: the form is that of a GPT-3 layer. Lines are rounded up
    one by one, so that their sum can be a byte or two above the form where ``tp`` does not divide.
    """
    hidden, tp = batch.micro_batch_size * batch.seq_len * model.hidden_size, mesh.tp
    if recompute == "full":
        source = f"{KORTHIKANTI}, table 2"
        return (Line(Kind.ACTIVATIONS, 2 * hidden, "input of the layer", "2·T·h", source),)
    source = f"{KORTHIKANTI}, eq. 4" if sequence_parallel else f"{KORTHIKANTI}, eq. 2"
    whole = (
        Line(Kind.ACTIVATIONS, ceil_div(10 * hidden, tp), "norms, dropouts and inputs, split", "ceil(10·T·h/p)", source)
        if sequence_parallel
        else Line(Kind.ACTIVATIONS, 10 * hidden, "norms, dropouts and inputs, on every rank", "10·T·h", source)
    )
    matrices = Line(Kind.ACTIVATIONS, ceil_div(24 * hidden, tp), "attention and MLP", "ceil(24·T·h/p)", source)
    if recompute == "selective":
        return whole, matrices
    scores = 5 * model.num_attention_heads * batch.seq_len * batch.seq_len * batch.micro_batch_size
    return whole, matrices, Line(Kind.ACTIVATIONS, ceil_div(scores, tp), "attention scores", "ceil(5·a·T·s/p)", source)
