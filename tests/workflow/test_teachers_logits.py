"""Losses that compare all logits with a teacher's, written out, take at most the bytes of a logit that zeroplan counts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.workflow.watched import Watch
from zeroplan import estimate, job
from zeroplan.ledger import Kind
from zeroplan.workflow import loop_of_file

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch
if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

TOKENS, WORDS = 1024, 4096
functional = torch.nn.functional


def jsd(student: Tensor, teacher: Tensor) -> tuple[Tensor, object]:
    """ms-swift 3602360a, rlhf_trainers/gkd_loss.py: gkd_loss with extract_active and jsd_loss, beta 0.5."""
    mask = torch.ones(TOKENS, dtype=torch.bool)
    ours, theirs = student[mask], teacher[mask]
    s_logits, t_logits = ours / 0.9, theirs / 0.9
    beta = torch.tensor(0.5, dtype=student.dtype)
    total = s_logits.new_zeros(())
    for at in range(0, TOKENS, 512):
        s_log, t_log = (functional.log_softmax(one[at : at + 512], dim=-1) for one in (s_logits, t_logits))
        m_log = torch.logsumexp(torch.stack([s_log + torch.log1p(-beta), t_log + torch.log(beta)]), dim=0)
        parts = [(torch.exp(one) * (one - m_log)).sum(-1) for one in (t_log, s_log)]
        total = total + (beta * parts[0] + (1 - beta) * parts[1]).sum()
    return total, (ours, theirs, s_logits, t_logits)


def jsd_and_sft(student: Tensor, teacher: Tensor) -> tuple[Tensor, object]:
    """The same, with ``sft_alpha``: the model has computed cross-entropy of the logits in fp32 (transformers, ForCausalLMLoss)."""
    lost = functional.cross_entropy(student.float(), torch.zeros(TOKENS, dtype=torch.long))
    total, held = jsd(student, teacher)
    return total + 0.1 * lost, held


def kd(student: Tensor, teacher: Tensor) -> tuple[Tensor, object]:
    """Torchtune 0.7, modules/loss/kd_losses.py, ForwardKLLoss, beside its cross-entropy, in eight pieces."""
    labels, kept = torch.zeros(TOKENS // 8, dtype=torch.long), []
    for ours, theirs in zip(student.chunk(8), teacher.chunk(8), strict=True):
        target = functional.softmax(theirs, dim=-1, dtype=torch.float32)
        is_inf = torch.isinf(ours)
        scores = functional.log_softmax(ours, dim=-1, dtype=torch.float32)
        kept.append(-torch.masked_fill(target * scores, is_inf, 0).sum())
    plain = [functional.cross_entropy(ours.float(), labels, reduction="sum") for ours in student.chunk(8)]
    return torch.stack([*kept, *plain]).sum(), None


def asft(student: Tensor, teacher: Tensor) -> tuple[Tensor, object]:
    """LLaMA-Factory ff6d4d12, train/trainer_utils.py: asft_loss_func of four sequences, whose last labels count, too."""
    ours, theirs = (one.view(4, TOKENS // 4, WORDS) for one in (student, teacher))
    wide, labels = ours.float(), torch.zeros(TOKENS - 4, dtype=torch.long)
    shifted, of_teacher = (one[..., :-1, :].contiguous().view(-1, WORDS) for one in (wide, theirs))
    lost = functional.cross_entropy(shifted, labels, reduction="none")
    apart = functional.kl_div(functional.log_softmax(shifted, dim=-1), functional.softmax(of_teacher, dim=-1), reduction="none")
    return (lost * torch.exp(-lost.detach())).mean() + 0.1 * apart.sum(dim=-1).mean(), (wide, shifted, of_teacher)


def eaft(student: Tensor, _teacher: Tensor) -> tuple[Tensor, object]:
    """LLaMA-Factory ff6d4d12, train/trainer_utils.py: _eaft_cross_entropy of the fp32 logits that accelerate returns."""
    labels = torch.zeros(TOKENS, dtype=torch.long)
    lost = functional.cross_entropy(student.float(), labels, reduction="none")
    with torch.no_grad():
        copied = student[labels == 0].detach()
        best, _ = torch.topk(copied, k=20, dim=-1)
        scores = best - torch.logsumexp(best, dim=-1, keepdim=True)
        entropy = -(torch.exp(scores) * scores).sum(dim=-1)
    return (lost * entropy / 3).mean(), None


def weighted(student: Tensor, _teacher: Tensor) -> tuple[Tensor, object]:
    """Axolotl 0.17, monkeypatch/loss/eaft.py: eaft_loss of one sequence in the fp32 logits that accelerate returns."""
    labels = torch.zeros(TOKENS, dtype=torch.long)
    shifted = student[None, :-1].contiguous().view(-1, WORDS)
    counts = labels[1:] != -100
    with torch.no_grad():
        best, _ = torch.topk(shifted[counts].float(), k=20, dim=-1)
        shares = functional.softmax(best, dim=-1)
        entropy = -(shares * torch.log(shares + 1e-10)).sum(dim=-1)
    lost = functional.cross_entropy(shifted[counts], labels[1:][counts], reduction="none")
    return (lost * entropy).mean(), shifted


def _of_a_logit(
    loss: Callable[[Tensor, Tensor], tuple[Tensor, object]], dtype: torch.dtype, *, alone: bool
) -> tuple[float, float, float]:
    """Return the bytes of a logit at the forward's peak, kept, and at the backward's; ``alone``: in fp32, without a teacher."""
    weight, hidden = (torch.randn(size, 8, dtype=dtype, requires_grad=True) for size in (WORDS, TOKENS))
    with Watch() as watch:
        teacher = torch.randn(TOKENS, 0 if alone else WORDS, dtype=dtype)
        student = (hidden @ weight.T).to(torch.float32 if alone else dtype)
        total, held = loss(student, teacher)
        forward = watch.peak
        del student, teacher, held
        kept = watch.peak = watch.now
        total.backward()
    each = TOKENS * WORDS
    return forward / each, kept / each, watch.peak / each


CASES = [
    ("jsd", jsd, "bf16"), ("jsd", jsd, "fp32"), ("jsd and sft", jsd_and_sft, "bf16"), ("jsd and sft", jsd_and_sft, "fp32"),
    ("kd", kd, "bf16"), ("asft", asft, "bf16"), ("eaft", eaft, "bf16"), ("eaft", eaft, "fp32"),
    ("eaft", weighted, "bf16"), ("eaft", weighted, "fp32"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "loss", "precision"), CASES)
def test_a_logit_takes_at_most_what_is_counted(name: str, loss: Any, precision: str) -> None:
    measured = _of_a_logit(loss, torch.bfloat16 if precision == "bf16" else torch.float32, alone=name == "eaft")
    asked = job(model="llama-3.2-1b", gpus=1, precision=precision, seq_len=1024, loss="log-probs", log_probs=name)
    each = 1024 * asked.model.vocab_size
    moments = {one.name: sum(int(line.n_bytes) for line in one.lines if line.kind is Kind.LOGITS) / each
               for one in estimate(asked).engine_moments}  # fmt: skip
    counted = moments["forward of the loss"], moments["backward of the divergence"]
    small = 0.16 if name == "eaft" else 0.05  # this test's head, and numbers per token: its 20 best words
    assert measured[0] <= counted[0] + small < measured[0] + 0.6, (measured, counted)
    assert measured[2] <= counted[1] + small < measured[2] + 2.1, (measured, counted)


@pytest.mark.parametrize("sequences", [1, 2, 8])
def test_entropies_of_16_bit_logits_take_less_than_cross_entropy(sequences: int) -> None:
    """ms-swift 3602360a, rlhf_trainers/grpo_trainer.py, _get_logps_via_local_forward; TRL's functions, one sequence at a time."""

    def grpo(student: Tensor, _teacher: Tensor) -> tuple[Tensor, object]:
        logits = student.view(sequences, TOKENS // sequences, WORDS)[:, :-1]
        logits.div_(0.9)
        scores, entropies = [], []
        for one in logits:
            logps = functional.log_softmax(one, dim=-1)
            scores.append(logps[:, 0])
        for one in logits.split(1, dim=0):
            logps = functional.log_softmax(one, dim=-1)
            entropies.append(-(torch.exp(logps) * logps).sum(-1))
        own = torch.stack(scores)
        return torch.exp(own - own.detach()).mean(), (logits, entropies)

    measured = _of_a_logit(grpo, torch.bfloat16, alone=False)
    asked = job(model="llama-3.2-1b", gpus=2, engine="deepspeed", stage=2, seq_len=1024)
    each = 1024 * asked.model.vocab_size
    moments = [one for one in estimate(asked).engine_moments if "the loss" in one.name]
    at_loss = [sum(int(line.n_bytes) for line in one.lines if line.kind is Kind.LOGITS) / each for one in moments]
    teacher = 2  # of this test alone, which deletes it after the forward
    assert max(measured[0] - teacher, *measured[1:]) <= max(at_loss)


def test_the_teachers_forward_and_the_step_hold_the_teacher() -> None:
    asked = job(model="qwen2.5-7b", gpus=4, engine="deepspeed", stage=3, seq_len=2048, loss="log-probs", log_probs="jsd")
    said = {"workflow": "distill", "teacher_model": "qwen2.5-14b", "vllm_mode": "server"}
    phases = {one.name: one for one in loop_of_file(asked, said).phases}
    step, forward = phases["training step"], phases["teacher's forward, in every step"]
    logits = 2 * 2048 * asked.model.vocab_size
    assert [line.n_bytes for line in forward.lines if line.reason.startswith("the student's logits")] == [logits]
    teacher = sum(int(line.n_bytes) for line in step.lines if line.reason.startswith("teacher: "))
    completions = sum(int(line.n_bytes) for line in step.lines if line not in estimate(asked).peak.lines) - teacher
    assert step.total_bytes == int(estimate(asked).peak.total_bytes) + teacher + completions
    assert completions == 2 * 8 * 2048
