"""What transformers' ``generate`` takes on a CPU is at most what zeroplan counts for rollouts without vLLM."""

from __future__ import annotations

import pytest

from tests.workflow.watched import Watch
from zeroplan import estimate
from zeroplan.catalog.config import model_from_config
from zeroplan.ledger import Kind
from zeroplan.resolve import job
from zeroplan.workflow.generating import generation

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch
SHAPES: dict[str, dict[str, int]] = {
    "a long prompt": {"rows": 2, "prompt": 384, "completion": 3, "vocab_size": 128, "num_key_value_heads": 2},
    "long completions": {"rows": 8, "prompt": 32, "completion": 32, "vocab_size": 128, "num_key_value_heads": 4},
    "a large vocabulary": {"rows": 8, "prompt": 8, "completion": 3, "vocab_size": 32768, "num_key_value_heads": 2},
}


@pytest.mark.parametrize(("case", "attention"), [*((case, "sdpa") for case in SHAPES), ("long completions", "eager")])
def test_generate_takes_at_most_what_is_counted(case: str, attention: str) -> None:
    transformers, of = pytest.importorskip("transformers"), dict(SHAPES[case])
    rows, prompt, completion = (of.pop(key) for key in ("rows", "prompt", "completion"))
    config = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4,
              "max_position_embeddings": 512, "tie_word_embeddings": True} | of  # fmt: skip
    model = transformers.LlamaForCausalLM._from_config(
        transformers.LlamaConfig(**{key: value for key, value in config.items() if key != "model_type"}),
        dtype=torch.bfloat16, attn_implementation=attention,
    )  # fmt: skip
    weights = sum(one.numel() * one.element_size() for one in {id(one): one for one in model.parameters()}.values())
    ids = torch.randint(1, 128, (rows, prompt))
    with Watch() as watch, torch.no_grad():
        model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=completion, min_new_tokens=completion, do_sample=True,
            top_p=0.9, top_k=50, temperature=0.7, pad_token_id=0, eos_token_id=None,
        )  # fmt: skip
    asked = job(model=model_from_config(config, name="tiny"), gpus=1, precision="bf16", seq_len=prompt + completion,
                attention=attention)  # fmt: skip
    phase = generation(estimate(asked), prompt, rows, ())
    counted = sum(int(line.n_bytes) for line in phase.lines if line.kind is not Kind.PARAMETERS)
    assert 0.5 * counted < watch.peak - weights <= counted
