"""The tensors that Megatron-LM's pipeline schedules keep alive, compared with Megatron-LM run without a GPU.

The figures are from `zeroplan dryrun --gpus 8 -- pretrain_gpt.py` of Megatron-LM 991c38ff (January 2026), with local layers,
torch's softmax and four pipeline ranks. They are the peaks of each phase of the second step, without cuBLAS's workspaces. [MiB]
"""

from __future__ import annotations

import pytest

from zeroplan import Kind, MegatronOptions, RecipeSpec, estimate
from zeroplan.engines.megatron.leftover import Stage, left_of
from zeroplan.spec.batch import BatchSpec
from zeroplan.spec.job import JobSpec
from zeroplan.spec.mesh import MeshSpec
from zeroplan.spec.model import ModelSpec
from zeroplan.units import MIB

MODEL = ModelSpec(
    family="gpt2", hidden_size=512, intermediate_size=2048, num_hidden_layers=12, num_attention_heads=8, num_key_value_heads=8,
    head_dim=64, vocab_size=50257, positions=1024, max_position_embeddings=1024, tie_word_embeddings=True,
)  # fmt: skip
OPTIONS = MegatronOptions(
    transformer_impl="local", hidden_dropout=True, attention_dropout=True, masked_softmax_fusion=False, deterministic_mode=True,
    gradient_accumulation_fusion=False,
)  # fmt: skip
#: Causal masks of middle chunks, which get no batch: per layer in flight, one byte for each pair of tokens. zeroplan leaves them
#: out. [MiB]
MASKS = 8


def _allocated(rank: int, moment: str, *, chunks: int) -> float:
    """Return the estimated memory at a moment, without cuBLAS's workspaces. [MiB]"""
    several = chunks > 1
    recipe = RecipeSpec(
        engine="megatron", zero_stage=0, precision="bf16-mixed", attention="eager", megatron=OPTIONS,
        pipeline_schedule="interleaved-1f1b" if several else None, pipeline_stages_per_rank=chunks if several else None,
    )  # fmt: skip
    batch = BatchSpec(micro_batch_size=4, seq_len=1024, grad_accum_steps=4)
    answer = estimate(JobSpec(model=MODEL, recipe=recipe, mesh=MeshSpec(dp_shard=2, pp=4), batch=batch), pipeline_rank=rank)
    found = next(one for one in answer.moments if one.name == moment)
    workspaces = sum(line.n_bytes for line in found.lines if line.kind is Kind.WORKSPACE and "cuBLAS" in line.reason)
    return (found.total_bytes - workspaces) / MIB


@pytest.mark.parametrize(
    ("rank", "chunks", "moment", "allocated"),
    [
        (0, 1, "all that is in flight", 3462.483), (0, 1, "backward of a layer", 3498.437), (3, 1, "loss", 2551.958),
        (3, 1, "backward of the loss", 2547.739), (3, 3, "loss", 3932.333 - MASKS),
        (3, 3, "backward of the loss", 3936.114 - MASKS),
    ],
)  # fmt: skip
def test_a_pipeline_rank_holds_what_megatron_s_own_program_does(rank: int, chunks: int, moment: str, allocated: float) -> None:
    """The run rounds blocks up to 512 bytes. The estimate leaves out losses and counts of a few bytes."""
    assert _allocated(rank, moment, chunks=chunks) == pytest.approx(allocated, abs=0.1)


def test_nothing_is_left_without_a_pipeline_or_before_a_second_round() -> None:
    assert set(left_of(Stage(0, 1, 1, 8, 1), overlapped=True)) == {0}
    first_round = left_of(Stage(1, 4, 1, 3, 4), overlapped=True)
    assert (first_round.forward, first_round.backward, first_round.step) == (0, 0, 2)


@pytest.mark.parametrize(
    ("at", "overlapped", "backward"), [(0, True, 3), (0, False, 2), (1, True, 7), (1, False, 4)]
)  # fmt: skip
def test_interleaved_ranks_keep_outputs_until_they_are_sent_and_inputs_of_idle_chunks(
    at: int, overlapped: bool, backward: int
) -> None:
    """Compared tensor by tensor at the peak with Megatron-Core 0.16.1, run without a GPU with two ranks of two chunks.

    Alive are the output of the last forward and the gradient of the last backward. The last rank also has the input and gradient of
    the chunk without micro-batches in flight. With overlapped communication the next input is added, and on the last rank the
    warm-up's last input and its gradient.
    """
    assert left_of(Stage(at, 2, 2, 4, 2), overlapped=overlapped).backward == backward
