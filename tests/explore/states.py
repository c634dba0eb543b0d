"""Draws random states of the page's controls: valid and invalid jobs."""

from __future__ import annotations

import json

from hypothesis import strategies as st

from zeroplan.explore.controls import Control, controls

OPTIONS = (
    "",
    "fsdp2.reshard_after_forward=8",
    "deepspeed.reduce_bucket_size=5e7 deepspeed.overlap_comm=true",
    "ddp.bucket=",
    "x",
)
SMALL = ("gpt2", "llama-3.2-1b", "qwen3-0.6b", "mixtral-8x7b", "7e9")

OWN = {
    "model_type": "llama", "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8,
    "intermediate_size": 8192, "vocab_size": 128256, "max_position_embeddings": 131072,
}  # fmt: skip
"""The config.json of a model that the catalogue does not have."""


def _values(control: Control) -> st.SearchStrategy[str]:
    if control.name == "model":
        return st.sampled_from(SMALL)
    if control.name == "config":
        return st.sampled_from(("", "", "", json.dumps(OWN)))
    if control.kind == "choice":
        return st.sampled_from(control.choices)
    if control.name == "set":
        return st.sampled_from(OPTIONS)
    return st.integers(0, 6).map(lambda power: str(min(control.least * 2**power, control.most)))


def states() -> st.SearchStrategy[dict[str, str]]:
    """Return any value of every control, whether they can be combined or not."""
    return st.fixed_dictionaries({control.name: _values(control) for control in controls()})


_GO_TOGETHER = ("model", "gpu", "gpus", "stage", "precision", "recompute", "seq_len", "micro_batch", "grad_accum")


def jobs() -> st.SearchStrategy[dict[str, str]]:
    """Return states whose values can be combined, unless the sequence is too long for the model."""
    return st.fixed_dictionaries({control.name: _values(control) for control in controls() if control.name in _GO_TOGETHER})
