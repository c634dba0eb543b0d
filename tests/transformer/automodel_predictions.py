"""Runs NeMo AutoModel's own Nemotron 3 with multi-token prediction on a CPU, and counts its bytes."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import NamedTuple

import pytest

#: A small model: one block of attention and one of experts before the predictions.
SHAPE = {
    "hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "moe_intermediate_size": 96, "num_experts_per_tok": 2,
}  # fmt: skip
EXPERTS, SHARED = 8, 192


class Run(NamedTuple):
    """Highest moments of a step, in bytes beyond the weights: the model's forward, the losses, and the backward."""

    forward: int
    loss: int
    backward: int


def run_predictions(depths: int, *, repeats: bool, tokens: int, vocabulary: int) -> Run:
    """Run forward, losses and backward once. Skips the test without ``nemo_automodel``.

    One operator replaces the norm, of which a CPU has no kernel, and one the experts' activation, which AutoModel compiles.
    """
    torch = pytest.importorskip("torch")
    pytest.importorskip("nemo_automodel.components.models.nemotron_v3.model")
    from nemo_automodel.components.loss.masked_ce import MaskedCrossEntropy  # type: ignore[import-not-found]
    from nemo_automodel.components.loss.mtp import calculate_mtp_loss  # type: ignore[import-not-found]

    from zeroplan.verify.watching.timeline import Timeline
    from zeroplan.verify.watching.tracker import Tracker

    model = _model(depths, repeats=repeats, vocabulary=vocabulary).to(torch.bfloat16).train()
    loss, tracker = MaskedCrossEntropy(), Tracker()
    with pytest.MonkeyPatch.context() as patch:
        kept = _saves_its_inputs(torch)
        patch.setattr(torch.nn.RMSNorm, "forward", lambda self, value: kept(value, self.weight, value.shape[:-1]))
        for module in model.modules():
            if type(module).__name__ == "GroupedExperts":
                module.expert_activation_grouped = lambda both, weights: kept(both, weights, (0,))
        with tracker:
            ids = torch.randint(0, vocabulary, (1, tokens))
            labels, at = ids * 1, [tracker.now]
            out = model(input_ids=ids)
            at.append(tracker.now)
            total = loss(out.logits, labels, num_label_tokens=tokens)
            if depths:
                total = total + calculate_mtp_loss(
                    loss, mtp_per_depth_h=out.mtp_per_depth_h, labels=labels, model=model, num_label_tokens=tokens
                )
            at.append(tracker.now)
            total.backward()
            at.append(tracker.now)
    live = Timeline(tracker.recording).live
    return Run(*(max(live[begun : ended + 1]) - live[at[0]] for begun, ended in pairwise(at)))


def _model(depths: int, *, repeats: bool, vocabulary: int) -> object:
    from nemo_automodel.components.models.common import BackendConfig  # type: ignore[import-not-found]
    from nemo_automodel.components.models.nemotron_v3.model import NemotronHForCausalLM  # type: ignore[import-not-found]

    class Config(SimpleNamespace):
        def to_dict(self):
            return dict(self.__dict__)

    config = Config(
        **SHAPE, vocab_size=vocabulary, num_hidden_layers=2, layers_block_type=["attention", "moe"], n_routed_experts=EXPERTS,
        n_shared_experts=1, moe_shared_expert_intermediate_size=SHARED, n_group=1, topk_group=1, routed_scaling_factor=1.0,
        norm_topk_prob=True, mlp_bias=False, torch_dtype="bfloat16", layer_norm_epsilon=1e-5, tie_word_embeddings=False,
        num_nextn_predict_layers=depths, mtp_hybrid_override_pattern="*E", architectures=["NemotronHForCausalLM"],
    )  # fmt: skip
    backend = BackendConfig(
        attn="sdpa",
        linear="torch",
        rms_norm="torch",
        experts="torch_mm",
        dispatcher="torch",
        enable_hf_state_dict_adapter=False,
    )
    return NemotronHForCausalLM(config, backend=backend, mtp_use_repeated_layer=repeats)


def _saves_its_inputs(torch: object) -> object:
    """Return an operator that saves both inputs and fp32 numbers of a shape, and makes a gradient of each input."""

    class Kept(torch.autograd.Function):  # type: ignore[name-defined,misc]
        @staticmethod
        def forward(ctx, first, second, rows):
            ctx.save_for_backward(first, second, torch.zeros(rows, dtype=torch.float32))
            return first.new_ones(first.shape)

        @staticmethod
        def backward(ctx, _gradient):
            first, second, _ = ctx.saved_tensors
            return first.new_ones(first.shape), second.new_ones(second.shape), None

    return Kept.apply
