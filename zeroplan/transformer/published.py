"""A published closed formula of activations: Korthikanti et al. 2022.

Independent of the tensor-by-tensor account in ``activations``: 16-bit activations, one-byte dropout masks, scores kept,
an ungated MLP of four times the hidden width, and embeddings, final norm and logits left out.
"""

from zeroplan.ledger import Kind, Line
from zeroplan.numeric import ceil_div
from zeroplan.spec.batch import Batch
from zeroplan.spec.mesh import Mesh
from zeroplan.spec.model import ModelSpec
from zeroplan.spec.recipe import Recompute

KORTHIKANTI = "Korthikanti et al. 2022, arXiv:2205.05198"


def megatron_layer_lines(
    model: ModelSpec, mesh: Mesh, batch: Batch, *, sequence_parallel: bool, recompute: Recompute
) -> tuple[Line, ...]:
    """Return what one layer of ``model`` keeps on one rank by Korthikanti's closed formula. [bytes]

    The form is that of a GPT-3 layer: it ignores the model's own MLP width, grouped heads and gating. Each line is rounded up, so
    that their sum can be a byte or two above the form where ``tp`` does not divide.
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
