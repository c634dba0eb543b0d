"""What NeMo AutoModel's multi-token prediction holds outside its blocks: the most that its logits, losses and embeddings take.

AutoModel runs the head on the model's own hidden states, then the predictions' blocks, then every loss: the model's first. The
backward begins with the last prediction's loss and ends the model's own before it enters the blocks. Lines that the job's own
loss has are not repeated here. Read, not run.

Source: NeMo AutoModel 36044ad3, components/models/nemotron_v3/model.py, NemotronHForCausalLM.forward; components/loss/mtp.py,
calculate_mtp_loss; components/loss/masked_ce.py, MaskedCrossEntropy.forward.
"""

from zeroplan.expr import NOTHING, Size, Values
from zeroplan.ledger import Kind, Line
from zeroplan.spec.model import ModelSpec
from zeroplan.transformer.blocks import Ahead, Compute
from zeroplan.transformer.families.definition import Held
from zeroplan.transformer.families.tags import SAVED
from zeroplan.transformer.params import is_frozen
from zeroplan.transformer.symbols import T, V, e, h, r

MODEL = "NeMo AutoModel 36044ad3, components/models/nemotron_v3/model.py, NemotronHForCausalLM.forward"
LOSS = "NeMo AutoModel 36044ad3, components/loss/mtp.py, calculate_mtp_loss"
_IDS = 32


def ahead_of(model: ModelSpec, compute: Compute, values: Values, saved: tuple[Line, ...], *, cut: bool) -> Ahead:
    """Return the lines of a model's predictions. [bytes]

    ``saved``: tensors that the model's own final norm and head keep. ``cut``: no loss has logits. A prediction's loss saves the
    log-softmax of its logits in fp32; the highest moment of its forward also has the logits, which the model's output has too.
    """
    depths = model.predictions
    recomputed = compute.recompute != "none" and not model.predictor_repeats
    head = NOTHING if is_frozen(model, "head") else e * V * h
    rows: Size = depths * e * T * h if cut else 4 * depths * T * V
    passing = "gradient of the final norm's output" if cut else "logits of the model itself, then their gradient"
    beside = (
        Held(e * T * h if cut else e * T * V, passing, MODEL).line(Kind.LOGITS, values),
        Held(_IDS * depths * T, "ids and labels of the predictions, int64", LOSS).line(SAVED, values),
        *(one._replace(reason=f"model's own: {one.reason}") for one in saved),
    )
    embedded = Held(depths * r * T * h, "embeddings of the next tokens, inputs of checkpoints", MODEL)
    kept = "gradients of the predictions, which a loss without logits makes" if cut else "log-softmax of the predictions, fp32"
    losses = Held(rows, kept, LOSS).line(Kind.LOGITS, values)
    once_more = () if cut else (Held(e * T * V, "logits of a prediction", LOSS).line(Kind.LOGITS, values),)
    added = Held((2 if cut else 1) * head, "head's, from another prediction", LOSS)
    embedding = Held(e * V * h, "embedding's, from the predictions", MODEL)
    output = Held((1 + depths) * e * T * h, "hidden states of model and predictions, held by the model's output", MODEL)
    return Ahead(
        beside=(*beside, *((embedded.line(SAVED, values),) if recomputed else ())),
        forward=(losses, *once_more),
        backward=(losses, *((added.line(Kind.UNSHARDED_GRADIENTS, values),) if head is not NOTHING else ())),
        left=(
            output.line(SAVED, values),
            *(() if is_frozen(model, "embedding") else (embedding.line(Kind.UNSHARDED_GRADIENTS, values),)),
        ),
    )
