"""What do losses of each sequence's last token allocate? They are ms-swift's tasks ``embedding`` and ``generative_reranker``."""

from collections.abc import Iterator

from zeroplan.engines.megatron.parameters import head_of
from zeroplan.ledger import Kind, Line
from zeroplan.numeric import Int, ceil_div
from zeroplan.spec.described import Job
from zeroplan.transformer.megatron import element_of, own_part, own_part_formula

NORMALISED = "mcore-bridge 1.6.5, model/gpt_model.py, GPTModel._postprocess (read, not run)"
TWO_ROWS = "mcore-bridge 1.6.5, model/gpt_model.py, GPTModel._forward_generative_reranker (read, not run)"
_SCORES = 24
"""A token's two logits, their sum over ranks, the difference and its copy in the order of sequences. [bytes]"""


def kept_of_last_tokens(job: Job) -> Iterator[Line]:
    """Yield what the loss has of all tokens: normalised hidden states, or scores of two words. [bytes]

    A sequence-parallel rank gathers the tokens of all ranks. The embedding is then copied in the order of sequences.
    """
    gathers = job.recipe.sequence_parallel and job.mesh.tp > 1
    if job.recipe.megatron.last_tokens == "reranker":
        formula = f"{_SCORES}·ceil(T/C)"
        yield Line(Kind.LOGITS, _SCORES * _tokens(job), "scores of two words for all tokens", formula, TWO_ROWS)
        if gathers:
            yield _whole(1, job, "input of the head, gathered and kept", TWO_ROWS)
        return
    yield _own(1, job, "normalised hidden states", NORMALISED)
    reason = "embeddings of all tokens, gathered and copied" if gathers else "embeddings of all tokens, copied"
    yield _whole(2 if gathers else 1, job, reason, NORMALISED)


def last_tokens_backward(job: Job) -> Iterator[Line]:
    """Yield what the backward makes of the last tokens' gradients, which it first puts among zeros for all tokens. [bytes]"""
    if job.recipe.megatron.last_tokens == "reranker":
        yield from kept_of_last_tokens(job)
        yield _whole(1, job, "gradient of the head's input", TWO_ROWS, Kind.ACTIVATION_GRADIENTS)
        yield _own(1, job, "this rank's part of it", TWO_ROWS, Kind.ACTIVATION_GRADIENTS)
        weight, formula = head_of(job)
        n_bytes = element_of(job.recipe) * weight
        yield Line(Kind.TEMPORARY, n_bytes, "gradient of the head's weight, of two rows among zeros", f"e·{formula}", TWO_ROWS)
        return
    yield _whole(2, job, "embeddings of all tokens and their gradient", NORMALISED, Kind.ACTIVATION_GRADIENTS)
    yield _own(5, job, "gradients of hidden states before they are normalised", NORMALISED, Kind.ACTIVATION_GRADIENTS)


def _tokens(job: Job) -> Int:
    return ceil_div(job.batch.micro_batch_size * job.batch.seq_len, job.mesh.cp)


def _whole(count: int, job: Job, reason: str, source: str, kind: Kind = Kind.LOGITS) -> Line:
    """Return some tensors with the hidden states of all tokens of this context-parallel rank."""
    n_bytes = count * element_of(job.recipe) * _tokens(job) * job.model.hidden_size
    return Line(kind, n_bytes, reason, f"{count}·e·ceil(T/C)·h", source)


def _own(count: int, job: Job, reason: str, source: str, kind: Kind = Kind.LOGITS) -> Line:
    """Return some tensors with the hidden states of this rank's tokens."""
    whole = count * element_of(job.recipe) * job.batch.micro_batch_size * job.batch.seq_len * job.model.hidden_size
    return Line(kind, own_part(whole, job), reason, own_part_formula(f"{count}·e·T·h", job.recipe), source)
