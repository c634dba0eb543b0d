"""Compares the losses of NeMo AutoModel with dry runs: in the logits' own dtype, and of the vocabulary of all ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dryrun.running import SCRIPTS, dry_run
from zeroplan import BatchSpec, ModelSpec
from zeroplan.ledger import Role, total_bytes
from zeroplan.transformer.blocks import Compute
from zeroplan.transformer.head import head_pass

pytestmark = pytest.mark.torch

MODEL = ModelSpec(family="llama", hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
                  num_key_value_heads=4, head_dim=16, vocab_size=32768)  # fmt: skip
BATCH = BatchSpec(micro_batch_size=2, seq_len=256)


@pytest.mark.parametrize(("ranks", "kind"), [(1, "wide"), (1, "narrow"), (2, "wide"), (4, "narrow")])
def test_forward_and_backward_take_what_is_counted(ranks: int, kind: str, tmp_path: Path) -> None:
    """Up to labels, and what the script lacks: the gathering of the head's input."""
    script = str(SCRIPTS / "loss_of_automodel.py")
    run = dry_run("--gpus", str(ranks), "--", script, str(ranks), kind, folder=tmp_path, flags=("--json",))
    said = next(line for line in reversed(run.errors.splitlines()) if line.startswith("BYTES"))
    fused = (*["narrow-loss"] * (kind == "narrow"), *["gathered-logits"] * (ranks > 1))
    found = head_pass(MODEL, Compute(2, autocast=False, attention="sdpa", tp=ranks, fused=fused), BATCH)
    before = {line.reason for line in found.saved}

    def bytes_of(lines: tuple) -> int:  # type: ignore[type-arg]
        return total_bytes(tuple(one for one in lines if one.tag.role is not Role.LABELS and one.reason not in before))

    held = bytes_of(found.output)
    counted = bytes_of(found.loss_forward), held + bytes_of(found.loss), held + max(bytes_of(one.lines) for one in found.points)
    measured = [int(word) for word in said.split()[1:]]
    assert counted == pytest.approx(measured, rel=0.0005)
