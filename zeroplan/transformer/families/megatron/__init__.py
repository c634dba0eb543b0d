"""One Megatron-Core layer as a program: attention, Mamba-2, MLP and experts, of local modules or of Transformer Engine.

T5's decoder layers also attend to the encoder's output. Its encoder layers run the same program with their own numbers of tokens.

Sequence parallelism splits the tokens between matrices over the ranks, and each matrix gathers the tokens that it reads. Local
modules and Transformer Engine save the same tensors unless a function differs. Experts assume even routing.
"""

from zeroplan.expr import Size
from zeroplan.ledger import Role, Tag
from zeroplan.transformer.families import operators as op
from zeroplan.transformer.families.megatron.attention import attention, crossed
from zeroplan.transformer.families.megatron.experts import experts, mlp
from zeroplan.transformer.families.megatron.mamba import mixed
from zeroplan.transformer.families.megatron.matrices import added, column, norm
from zeroplan.transformer.families.megatron.sources import CORE
from zeroplan.transformer.families.megatron.structure import Layer
from zeroplan.transformer.families.megatron.symbols import P_e, S_e, T_e, T_n, T_w, f_r, h_r
from zeroplan.transformer.families.tape import Mode, Part, Site, Store, Tape, Value
from zeroplan.transformer.symbols import e, h

LAYER = f"{CORE}/transformer/transformer_layer.py, TransformerLayer.forward"
PREDICTED = f"{CORE}/transformer/multi_token_prediction.py, MultiTokenPredictionLayer"
_INPUT = Tag(Role.BLOCK_INPUT)
_IN_ENCODER = {"T_n": T_e, "T_m": T_e, "S_r": S_e, "P_m": P_e}


def run(structure: Layer) -> tuple[Tape, Value, Value]:
    """Run a layer's forward. Return the tape, the layer's input and its output."""
    tape = Tape(wide=structure.wide, autocast=False, saving=True)
    tape.in_fp8, tape.mode = structure.in_fp8, Mode(low_rank=structure.low_rank)
    given = Value(tape.make(op.TENSOR, "input of attention's norm", e * T_n * h, LAYER, _INPUT), e, T_n * h)
    if not structure.predicts:
        return tape, given, layer(tape, given, structure)
    joined = _predicted(tape, given)
    made = layer(tape, joined, structure)
    tape.release(joined)
    return tape, given, made


def _predicted(tape: Tape, hidden: Value) -> Value:
    """Join hidden states and the next token's embedding by a matrix, each after its own norm. Ranks gather the matrix's output."""
    embedded = op.tensor(tape, "embedding of the next token", e, T_n * h, PREDICTED)
    pair = norm(tape, embedded, "the next token's norm"), norm(tape, hidden, "the hidden states' norm")
    tape.release(embedded)
    both = op.run(tape, pair, "next token and hidden states, joined", Site("joined", PREDICTED), shape=2 * T_n * h)
    tape.release(*pair)
    apart = column(tape, both, h_r, "the joining matrix", reads=2 * h)
    tape.release(both)
    made = op.run(
        tape, apart, "input of attention's norm", Site("gathered", PREDICTED), dtype=e, shape=T_n * h,
        gradient="gradient of this rank's part of it",
        beside=("gathered gradient of the joining matrix's output", e * T_w * h),
    )  # fmt: skip
    tape.release(apart)
    return made


def own_size(store: Store, structure: Layer) -> Size:
    """Return the size of a tensor within its layer. Encoder layers have their own numbers of tokens and scores. [bytes]"""
    return store.size.replacing(_IN_ENCODER) if structure.of_t5 == "encoder" else store.size


def layer(tape: Tape, given: Value, structure: Layer) -> Value:
    """``TransformerLayer.forward``: norm, attention, dropout and residual addition; then the same with the MLP.

    A layer of a hybrid pattern has only attention, only the MLP, or only Mamba-2.
    """
    if structure.part == "mlp":
        middle = Value(tape.hold(given.store), given.dtype, given.shape)
    else:
        middle = _attended(tape, given, structure)
    if structure.part in ("attention", "mamba"):
        return middle
    if structure.of_t5 == "decoder":
        middle = crossed(tape, middle, structure)
    branch = _branch(tape, middle, structure)
    made = added(tape, branch, middle, "output of the layer", structure)
    tape.release(branch, middle)
    return made


def _attended(tape: Tape, given: Value, structure: Layer) -> Value:
    """Attention or Mamba-2, added to the residual stream. Norms that Transformer Engine's matrices contain have no checkpoint."""
    mamba, normed = structure.part == "mamba", Part("layernorm")
    with tape.within(normed):
        normal = norm(tape, given, "attention's norm")
    attended = (mixed if mamba else attention)(tape, normal, structure)
    tape.release(normal)
    if not mamba and (structure.local or structure.latent != "no"):
        tape.end(normed)
    middle = added(tape, attended, given, "input of the MLP's norm", structure)
    tape.release(attended)
    return middle


def _branch(tape: Tape, middle: Value, structure: Layer) -> Value:
    """The MLP or the experts, and the norm before. Transformer Engine's MLP contains the norm, so that one checkpoint has both."""
    normed, again = Part("layernorm"), Part("mlp")
    with tape.within(normed):
        normal = norm(tape, middle, "the MLP's norm")
    if structure.routing is not None:
        made = experts(tape, normal, structure.routing)
    else:
        with tape.within(again):
            made = mlp(tape, normal, f_r, "MLP")
        again.stores.update(() if structure.local else normed.stores)
        tape.end(again, made)
    tape.release(normal)
    if structure.local or structure.routing is not None:
        tape.end(normed)
    return made
