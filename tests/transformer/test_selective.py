"""Per-operation selective recomputation, as torchtitan does it, against what a real run keeps."""

from __future__ import annotations

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


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gpt2", "phi3", "granite", "gemma3_text", "gpt_neox", "opt"])
def test_keeps_the_input_attention_outputs_and_every_second_product(family: str) -> None:
    spec = tiny_spec(family, heads=4, kv_heads=2, head_dim=16, ffn=176, vocab=104, hidden=None if family in PLAIN_HEADS else 72)
    kept = _kept(spec, layers=3) - _kept(spec, layers=2) - RANDOM_STATE
    selective = block_pass(spec, "dense", BF16, BATCH).selective
    constants = {"gpt2": 3 * 8, "opt": 8, "granite": 2 * 8}.get(
        family, 0
    )  # GELU's, the queries' scale, multipliers: in tensors
    assert kept - constants == cpu_bytes(selective, BF16)


def _kept(spec: ModelSpec, *, layers: int) -> int:
    model = causal_model(spec, BF16, layers=layers)
    decoder = model.get_decoder()
    blocks = decoder.h if hasattr(decoder, "h") else decoder.layers
    for index in range(layers):
        blocks[index] = checkpoint_wrapper(blocks[index], context_fn=_contexts, early_stop=False)
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
