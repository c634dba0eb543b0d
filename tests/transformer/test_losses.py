"""Checks the losses by hand, and compares them with each other."""

import pytest

from tests.formulas import WITHOUT_FORMULA, evaluate
from zeroplan import BatchSpec, ModelSpec, estimate, job
from zeroplan.ledger import total_bytes
from zeroplan.spec.recipe import LogProbs
from zeroplan.transformer.blocks import Compute, HeadPass
from zeroplan.transformer.head import head_pass
from zeroplan.transformer.legend import legend

MODEL = ModelSpec(family="llama", hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
                  num_key_value_heads=2, head_dim=16, vocab_size=1000)  # fmt: skip
BATCH = BatchSpec(micro_batch_size=2, seq_len=40)
BF16 = Compute(2, autocast=False, attention="sdpa")
TOKENS, HIDDEN, VOCAB = 80, 64, 1000


def head(loss: str, compute: Compute = BF16) -> HeadPass:
    return head_pass(MODEL, compute, BATCH, loss=loss)


def at_the_loss(loss: str) -> int:
    """Return the live bytes at the first moment of the backward, without what norm and head had saved before."""
    found = head(loss)
    before = {line.reason for line in found.saved}
    return total_bytes(tuple(line for line in found.points[0].lines if line.reason not in before))


def test_the_full_loss_by_hand():
    """Forward: bf16 logits, fp32 logits, log-softmax; backward: log-softmax and two fp32 gradients."""
    logits = TOKENS * VOCAB
    labels = 8 * TOKENS + 8 * (TOKENS + 2)
    assert total_bytes(head("full").loss_forward) == (2 + 4 + 4) * logits + labels
    assert at_the_loss("full") == (4 + 8) * logits


def test_the_chunked_loss_by_hand():
    """A chunk has ten tokens. Labels and the fp32 buffer of the hidden states' gradients are alive, too."""
    chunk, beside = 10 * VOCAB, 8 * TOKENS + 4 * TOKENS * HIDDEN
    assert total_bytes(head("chunked").loss_forward) == beside + (2 + 4 + 4) * chunk
    assert at_the_loss("chunked") == beside + (2 + 4 + 8) * chunk
    assert head("chunked").output == ()


def test_the_fused_loss_by_hand():
    """V/h rounds up to 16; 80/16 = 5 tokens, so chunks of 8. The gradients of hidden states and weight already exist."""
    made, rows = 2 * TOKENS * HIDDEN + 2 * HIDDEN * VOCAB, 5 * TOKENS + 8 * TOKENS + 8 * (TOKENS + 2)
    assert total_bytes(head("fused").loss_forward) == made + 2 * TOKENS * HIDDEN + 2 * 8 * VOCAB + rows
    assert at_the_loss("fused") == 2 * TOKENS * HIDDEN
    assert total_bytes(head("fused").loss) == made
    assert head("fused").points[0].gradients == HIDDEN * VOCAB


def test_the_fused_loss_under_autocast_copies_the_transposed_weight_for_each_chunk():
    """Gradients are fp32 like hidden states and weights. Autocast casts a chunk of eight tokens."""
    made, rows = 4 * TOKENS * HIDDEN + 4 * HIDDEN * VOCAB, 5 * TOKENS + 8 * TOKENS + 8 * (TOKENS + 2)
    copies = 2 * HIDDEN * VOCAB + 2 * 8 * HIDDEN
    expected = made + 4 * TOKENS * HIDDEN + 2 * 8 * VOCAB + rows + copies
    assert total_bytes(head("fused", Compute(2, autocast=True, attention="sdpa")).loss_forward) == expected


def test_the_output_in_fp32_is_twice_that_in_bf16():
    plain, wide = (head_pass(MODEL, BF16, BATCH, fp32_output=choice).output for choice in (False, True))
    assert total_bytes(wide) == 2 * total_bytes(plain) == 4 * TOKENS * VOCAB


@pytest.mark.parametrize("loss", ["full", "chunked", "fused"])
@pytest.mark.parametrize(
    "compute", [BF16, Compute(4, autocast=False, attention="sdpa"), Compute(2, autocast=True, attention="sdpa")]
)
def test_formulas_give_their_numbers(loss: str, compute: Compute):
    found, values = head(loss, compute), legend(MODEL, compute, BATCH)
    for line in (
        *found.saved,
        *found.loss,
        *found.loss_forward,
        *(line for point in found.points for line in point.lines),
    ):
        if line.reason in WITHOUT_FORMULA:
            assert not line.formula
        else:
            assert evaluate(line.formula, values) == line.n_bytes, line


def test_verls_fused_head_by_hand():
    """All 80 tokens are one chunk; its peaks were compared with the function on a CPU, two of them to 0.2 %."""
    found, rows, weight = head("log-probs", BF16._replace(log_probs="chunks")), TOKENS * (VOCAB + 1), 2 * HIDDEN * VOCAB
    assert total_bytes(found.loss_forward) == 16 * rows + (8 + 4) * TOKENS
    before = {line.reason for line in found.saved}
    most = max(total_bytes(tuple(line for line in one.lines if line.reason not in before)) for one in found.points)
    previous = weight + 2 * TOKENS * HIDDEN
    assert most == 2 * TOKENS * HIDDEN + weight + previous + max(28 * rows, 18 * rows + weight) + 8 * TOKENS


def test_prime_rls_fused_head_by_hand():
    """All columns are one piece; its peaks were compared with the function on a CPU, all of them to 0.1 %."""
    found, piece, weight = head("log-probs", BF16._replace(log_probs="columns")), TOKENS * VOCAB, 2 * HIDDEN * VOCAB
    assert total_bytes(found.loss_forward) == 14 * piece + (8 + 16) * TOKENS
    before = {line.reason for line in found.saved}
    most = max(total_bytes(tuple(line for line in one.lines if line.reason not in before)) for one in found.points)
    beside = 2 * TOKENS * HIDDEN
    assert most == 2 * weight + beside + max(22 * piece, 16 * piece + beside) + 24 * TOKENS


def test_verls_head_in_triton_by_hand():
    """One piece of the forward's columns, and two of the backward's, whose width does not depend on the vocabulary. Read."""
    found, rows = head("log-probs", BF16._replace(log_probs="kernels")), (8 + 20) * TOKENS
    before = {line.reason for line in found.saved}
    most = max(total_bytes(tuple(line for line in one.lines if line.reason not in before)) for one in found.points)
    assert most == rows + 2 * HIDDEN * VOCAB + 2 * 2 * 9504 * TOKENS + 2 * 2 * TOKENS * HIDDEN


@pytest.mark.parametrize("how", ["in place", "compiled"])
def test_logits_that_loss_and_loop_hold_count_once(how: str):
    """In verl, sums of squared probabilities have a graph of their own, which holds the logits until the next micro-batch."""
    said = {"loss": "log-probs", "log_probs": how} if how == "in place" else {"fused_kernels": "compiled-loss"}
    for kept in (False, True):
        asked = job(model=MODEL, gpus=2, engine="fsdp2", stage=3, precision="bf16", seq_len=40, keep_logits=kept, **said)
        moments = {one.name: [line.reason for line in one.lines].count("logits") for one in estimate(asked).engine_moments}
        assert moments["backward of the loss" if how == "compiled" else "backward of the log-probabilities"] == 1
        assert moments["backward of block 2 of 2: down projection"] == kept


@pytest.mark.parametrize(("how", "rows", "gradients"), [("in place", 8, 0), ("entropy", 24, 2)])
def test_verls_loss_by_hand(how: LogProbs, rows: int, gradients: int):
    """All logits in 16 bits. Each of two losses makes its own gradient, and so does the division by the temperature."""
    found = head("log-probs", BF16._replace(log_probs=how))
    logits, beside = 2 * TOKENS * VOCAB, (8 + rows) * TOKENS
    assert total_bytes(found.loss_forward) == logits + beside
    before = {line.reason for line in found.saved}
    alive = [total_bytes(tuple(line for line in one.lines if line.reason not in before)) for one in found.points]
    assert max(alive) == max(2 * logits, (1 + gradients) * logits + beside * bool(gradients))
