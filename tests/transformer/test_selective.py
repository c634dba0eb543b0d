"""Compares torchtitan's selective recomputation by operator with what a real run keeps."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper  # noqa: E402
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts  # noqa: E402

from tests.causal_models import causal_model, tiny_spec  # noqa: E402
from zeroplan.comparison import cpu_bytes  # noqa: E402
from zeroplan.spec.batch import BatchSpec  # noqa: E402
from zeroplan.spec.family import PLAIN_HEADS  # noqa: E402
from zeroplan.transformer.activations import block_pass  # noqa: E402
from zeroplan.transformer.blocks import Compute  # noqa: E402
from zeroplan.verify.watching.allocations import mark, recorded  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.utils.checkpoint import SelectiveCheckpointContext

    from zeroplan.spec.model import ModelSpec

pytestmark = pytest.mark.torch

BF16 = Compute(2, autocast=False, attention="sdpa")
BATCH = BatchSpec(micro_batch_size=2, seq_len=40)
RANDOM_STATE = 5056
"""Each checkpoint's copy of the CPU generator; host memory on a GPU machine."""
EXPERTS = 4


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gpt2", "phi3", "granite", "gemma3_text", "gpt_neox", "opt"])
def test_keeps_the_input_attention_outputs_and_every_second_product(family: str) -> None:
    spec = tiny_spec(family, heads=4, kv_heads=2, head_dim=16, ffn=176, vocab=104, hidden=None if family in PLAIN_HEADS else 72)
    kept = _kept(spec, 3) - _kept(spec, 2) - RANDOM_STATE
    selective = block_pass(spec, "dense", BF16, BATCH).selective
    constants = {"gpt2": 3 * 8, "opt": 8, "granite": 2 * 8}.get(
        family, 0
    )  # GELU's, the queries' scale, multipliers: in tensors
    assert kept - constants == cpu_bytes(selective, BF16)


@pytest.mark.parametrize("keeps", ["inputs-kept", "router-kept"])
def test_checkpoints_of_automodel_keep_parts_inputs_or_the_routers_outputs(keeps: str) -> None:
    spec = tiny_spec("mixtral", heads=4, kv_heads=2, head_dim=16, ffn=176, vocab=104, hidden=64)
    if keeps == "router-kept":  # Mixtral divides the best scores in place, which such a checkpoint refuses
        spec = replace(spec, family="olmoe")
    compute = BF16._replace(fused=(keeps,))
    parts = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp") if keeps == "inputs-kept" else ()
    kept = _kept(spec, 3, parts, _router) - _kept(spec, 2, parts, _router) - max(1, len(parts)) * RANDOM_STATE
    assert kept == cpu_bytes(block_pass(spec, "moe", compute, BATCH).selective, compute)


def _router() -> tuple[object, object]:
    """Keep what AutoModel's components/moe/parallelizer.py, apply_ac, names: the router's product and the best experts."""

    def policy(_context: object, operator: object, *arguments: object, **_: object) -> CheckpointPolicy:
        routes = operator is torch.ops.aten.mm.default and arguments[1].shape[1] == EXPERTS  # type: ignore[attr-defined]
        return (
            CheckpointPolicy.MUST_SAVE
            if routes or operator is torch.ops.aten.topk.default
            else CheckpointPolicy.PREFER_RECOMPUTE
        )

    return create_selective_checkpoint_contexts(policy)


def _kept(
    spec: ModelSpec, layers: int, parts: tuple[str, ...] = (), contexts: Callable[[], tuple[object, object]] | None = None
) -> int:  # fmt: skip
    model = causal_model(spec, BF16, layers=layers)
    decoder = model.get_decoder()
    blocks = decoder.h if hasattr(decoder, "h") else decoder.layers
    for index in range(layers):
        for name in parts:
            setattr(blocks[index], name, checkpoint_wrapper(getattr(blocks[index], name), early_stop=False))
        if not parts:
            blocks[index] = checkpoint_wrapper(blocks[index], context_fn=contexts or _contexts, early_stop=False)
    ids = torch.randint(0, spec.vocab_size, (BATCH.micro_batch_size, BATCH.seq_len))
    model(input_ids=ids, labels=ids).loss.backward()
    with recorded() as timeline:
        output = model(input_ids=ids, labels=ids)
        mark("end")
        del output
    return timeline.live_bytes("end")


def _contexts() -> tuple[object, object]:
    return create_selective_checkpoint_contexts(_policy())


def _policy() -> Callable[..., CheckpointPolicy]:
    products = {False: 0, True: 0}
    saved = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default, torch.ops.aten.mm.default}

    def policy(context: SelectiveCheckpointContext, operator: object, *_: object, **__: object) -> CheckpointPolicy:
        if operator is torch.ops.aten.mm.default:
            products[context.is_recompute] += 1
            if products[context.is_recompute] % 2 == 0:
                return CheckpointPolicy.PREFER_RECOMPUTE
        return CheckpointPolicy.MUST_SAVE if operator in saved else CheckpointPolicy.PREFER_RECOMPUTE

    return policy
