"""A 4-bit fine-tune on a real GPU: a public snapshot of its allocator against the estimate. Needs no torch."""

import json
from pathlib import Path

from zeroplan import estimate, job
from zeroplan.engines.device import workspace_line
from zeroplan.ledger import Kind

SNAPSHOT = json.loads((Path(__file__).parent / "requests_on_gpus.jsonl").read_text().splitlines()[0])
#: From the notebook beside the snapshot: TinyLlama 1.1B in nf4, prepared by peft, rank 16 on peft's default targets, 1,000 tokens.
JOB = job(model="tinyllama-1.1b", gpus=1, gpu="rtx-3090", lora_rank=16, lora_targets="q_proj,v_proj", quantize="nf4", seq_len=1000,
          precision="fp32")  # fmt: skip
LAYERS = 22


def test_before_the_first_step_the_gpu_held_what_is_estimated_to_the_byte():
    """4-bit weights with scales and tables; adapters, norms, embedding and head in fp32; cuBLAS's workspaces; the batch.

    transformers 4.41 kept 32 inverse frequencies in every layer; today it keeps them once.
    """
    held = sum(n_bytes for _, blocks in SNAPSHOT["segments"] for _, n_bytes in blocks)
    parameters = sum(int(line.n_bytes) for line in estimate(JOB).states if line.kind is Kind.PARAMETERS)
    batch, frequencies = 8 * JOB.batch.seq_len, LAYERS * 32 * 4
    assert held == 1_095_725_248
    assert held == parameters + int(workspace_line(JOB.cluster.gpu).n_bytes) + batch + frequencies
