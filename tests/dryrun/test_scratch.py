"""Scratch memory inside attention kernels is part of a dry run's peak, and equals that of the estimate."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.dryrun.running import dry_run
from tests.transformer.tiny_configs import tiny_config
from zeroplan.catalog.config import model_from_config
from zeroplan.spec.batch import BatchSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")
_FLASH = (torch.ops.aten._scaled_dot_product_flash_attention_backward.default, torch.ops.aten._flash_attention_backward.default)
ATTENTION = """
import torch
q, k, v = (torch.randn(2, 4, 1000, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
optimizer = torch.optim.SGD([q, k, v], lr=0.1)
for _ in range(9):
    torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_flash_attentions_scratch_is_alive_with_the_kernels_results(tmp_path: Path):
    (tmp_path / "attention.py").write_text(ATTENTION)
    phases = dry_run("--", "attention.py", folder=tmp_path).answer["steps"][-1]["phases"]
    backward = next(phase for phase in phases if phase["phase"] == "backward")
    tensor = 2 * 2 * 4 * 1000 * 64
    scratch = 4 * 2 * 4 * 1024 * (64 + 1)
    rows = 4 * 2 * 4 * 1000
    copied = 2 * tensor  # the output, in which heads come first, and the sum's gradient, which is an expanded scalar
    assert backward["peak_bytes"] == pytest.approx(7 * tensor + rows + scratch + copied, rel=0.001)


def test_an_output_and_a_gradient_with_heads_before_tokens_are_copied():
    from zeroplan.dryrun.scratch import SCRATCH

    by_heads, by_tokens = (SCRATCH[one] for one in _FLASH)
    heads_first = torch.empty(2, 4, 100, 64, dtype=torch.bfloat16)
    tokens_first = torch.empty(2, 100, 4, 64, dtype=torch.bfloat16)
    n_bytes = 2 * tokens_first.numel()
    of_sdpa = {"first": heads_first, "second": tokens_first.transpose(1, 2)}
    of_flash = {"first": heads_first.transpose(1, 2), "second": tokens_first}

    def taken(kernel: Callable[[Sequence[object]], int], tensors: dict[str, Any], gradient: str, out: str) -> int:
        query = tensors["second"]
        return kernel((tensors[gradient], query, query, query, tensors[out], None, None))

    for kernel, tensors in ((by_heads, of_sdpa), (by_tokens, of_flash)):
        none = taken(kernel, tensors, "second", "second")
        assert taken(kernel, tensors, "first", "second") == none + n_bytes
        assert taken(kernel, tensors, "second", "first") == none + n_bytes
        assert taken(kernel, tensors, "first", "first") == none + 2 * n_bytes


COPIED = """
import torch, transformers, zeroplan.dryrun.scratch as scratch
flash = torch.ops.aten._scaled_dot_product_flash_attention_backward.default
counted = scratch.SCRATCH[flash]
def told(args):
    print("contiguous", [args[at].transpose(1, 2).is_contiguous() for at in (0, 4)])
    return counted(args)
scratch.SCRATCH[flash] = told
config = transformers.{config}(
    hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, vocab_size=99,
    max_position_embeddings=64, pad_token_id=0, attention_dropout=0.0)
model = transformers.AutoModelForCausalLM.from_config(config).cuda().bfloat16()
optimizer = torch.optim.SGD(model.parameters())
tokens = torch.zeros(2, 48, dtype=torch.int64, device="cuda")
for _ in range(3):
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("config", "out"), [("LlamaConfig", True), ("Qwen3Config", True), ("GPTNeoXConfig", False), ("Phi3Config", False)]
)
def test_only_models_that_join_rotated_parts_copy_the_output(tmp_path: Path, config: str, *, out: bool):
    """Joining puts heads before tokens in the queries, and the output has the queries' layout. A Llama does not join."""
    pytest.importorskip("transformers")
    (tmp_path / "model.py").write_text(COPIED.replace("{config}", config))
    run = dry_run("--", "model.py", folder=tmp_path, flags=("--json",))
    assert run.answer["steps"]
    assert {line for line in run.errors.splitlines() if line.startswith("contiguous")} == {f"contiguous [True, {out}]"}


@pytest.mark.parametrize(("size", "columns"), [(128, 128), (136, 192), (192, 192), (200, 256)])
def test_heads_larger_than_128_are_padded_to_a_multiple_of_64(size: int, columns: int):
    from zeroplan.dryrun.scratch import flash_scratch_bytes

    assert flash_scratch_bytes(128, 1, size, key_rows=128, key_heads=1, element=2) == 4 * 128 * (columns + 1)


@pytest.mark.parametrize("key_heads", [4, 2, 1])
@pytest.mark.parametrize(("sequences", "length", "size"), [(1, 128, 32), (3, 200, 64), (2, 77, 80), (2, 77, 136)])
def test_flash_attentions_scratch_equals_that_of_the_estimate(sequences: int, length: int, size: int, key_heads: int):
    from zeroplan.dryrun.scratch import SCRATCH
    from zeroplan.transformer.blocks import Compute
    from zeroplan.transformer.families.attention import flash_scratch, head_size
    from zeroplan.transformer.families.widths import quantities, widths

    said: Mapping[str, object] = tiny_config("llama") | {
        "num_attention_heads": 4, "num_key_value_heads": key_heads, "head_dim": size, "hidden_size": 4 * size,
    }  # fmt: skip
    batch = BatchSpec(micro_batch_size=sequences, seq_len=length)
    compute = Compute(element_bytes=2, autocast=False, attention="sdpa")
    x = widths(model_from_config(said), compute, batch)
    known = int(flash_scratch(head_size(size), grouped=x.key != x.query).value(quantities(x, 0)))
    query, key = (torch.empty(sequences, heads, length, size, dtype=torch.bfloat16) for heads in (4, key_heads))
    by_heads, by_tokens = (SCRATCH[one] for one in _FLASH)
    in_order = torch.empty(sequences, length, 4, size, dtype=torch.bfloat16)
    of_heads = in_order.transpose(1, 2)
    assert by_heads((of_heads, query, key, key, of_heads)) == known
    assert by_tokens((in_order, query.transpose(1, 2), key.transpose(1, 2), key, in_order, None, None)) == known


def test_packed_sequences_have_128_rows_of_padding_each():
    from zeroplan.dryrun.scratch import SCRATCH

    packed = SCRATCH[_FLASH[1]]
    tokens, starts = torch.empty(300, 4, 64, dtype=torch.bfloat16), torch.zeros(4, dtype=torch.int32)
    assert packed((tokens, tokens, tokens, tokens, tokens, None, starts)) == 4 * (300 + 3 * 128) * 4 * (64 + 1)


MASKED = ATTENTION.replace("is_causal=True", "attn_mask=mask").replace(
    "optimizer =", "mask = torch.zeros(1000, 1000, device='cuda', dtype=torch.bfloat16)\noptimizer ="
)


def test_attention_with_a_mask_sums_the_gradient_of_the_queries_in_32_bits(tmp_path: Path):
    (tmp_path / "masked.py").write_text(MASKED.replace("1000, 64,", "1000, 256,"))
    phases = dry_run("--", "masked.py", folder=tmp_path).answer["steps"][-1]["phases"]
    backward = next(phase for phase in phases if phase["phase"] == "backward")
    tensor, heads, rows, mask = 2 * 2 * 4 * 1000 * 256, 2 * 4, 4 * 2 * 4 * 1024, 2 * 1000 * (1000 + 1008)  # and rows of 16
    scratch = 4 * heads * (1000 + 8 * 4 * (128 * 64 + 4) + 2 * 16 * 64 * 256)
    copied = tensor  # the sum's gradient is an expanded scalar
    assert backward["peak_bytes"] == pytest.approx(7 * tensor + rows + mask + scratch + copied, rel=0.001)


@pytest.mark.parametrize(
    ("size", "half", "dropout", "capability", "floats"),
    [
        (64, True, False, (9, 0), 16 * (64 * 64 + 4)),
        (80, True, False, (9, 0), 8 * (128 * 128 + 4)),
        (80, True, False, (8, 9), 8 * 2 * (128 * 64 + 4)),
        (80, True, True, (8, 9), 16 * 2 * (64 * 64 + 4) + 2 * 16 * 64 * 128),
        (128, True, False, (12, 0), 16 * 2 * (64 * 64 + 4) + 2 * 16 * 64 * 128),
        (128, False, False, (8, 0), 8 * 2 * (128 * 64 + 4)),
        (64, False, False, (8, 0), 16 * (64 * 64 + 4)),
    ],
)
def test_the_workspace_depends_on_the_kernels_block_sizes(
    size: int, half: bool, dropout: bool, capability: tuple[int, int], floats: int
):
    from zeroplan.dryrun.scratch import Heads, efficient_workspace_bytes

    found = efficient_workspace_bytes(Heads(8, 1000, 1000, size, size), half=half, dropout=dropout, capability=capability)
    assert found == 4 * 8 * floats


def test_with_many_heads_keys_are_split_into_fewer_parts():
    from zeroplan.dryrun.scratch import Heads, efficient_workspace_bytes

    def more(heads: int, keys: int) -> int:
        """Return the rows of sums for keys and values, per head of size 256."""
        found = efficient_workspace_bytes(Heads(heads, 128, keys, 256, 256), half=True, dropout=False, capability=(9, 0))
        return (found // (4 * heads) - 4 * (128 * 64 + 4)) // (2 * 256)

    assert [more(8, 1000), more(50, 1000), more(300, 1000), more(300, 128), more(20, 128)] == [1024, 256, 64, 64, 128]


def test_in_32_bits_the_sums_need_a_whole_product():
    from zeroplan.dryrun.scratch import Heads, efficient_backward_bytes, efficient_workspace_bytes

    narrow, wide = Heads(8, 1024, 1024, 64, 64), Heads(8, 1024, 1024, 64, 128)
    on = {"half": False, "dropout": False, "capability": (9, 0)}
    rows = 4 * 8 * 1024
    assert efficient_backward_bytes(narrow, **on) == rows * (64 + 2)
    assert efficient_backward_bytes(wide, **on) == rows * (128 + 2)
    assert efficient_workspace_bytes(narrow, **on) == rows * 64 + 16 * 8 * 16


def test_a_forward_with_large_heads_sums_its_output_in_32_bits():
    from zeroplan.dryrun.scratch import SCRATCH

    forward = SCRATCH[torch.ops.aten._scaled_dot_product_efficient_attention.default]
    large, small = ([torch.empty(2, 4, 100, size, dtype=torch.bfloat16)] * 3 for size in (192, 128))
    value = torch.empty(2, 4, 100, 128, dtype=torch.bfloat16)
    assert forward((*large[:2], value)) == 4 * 2 * 4 * 100 * 128  # like DeepSeek's heads
    assert forward(small) == forward([one.float() for one in large]) == 0


@pytest.mark.parametrize("half", [True, False])
@pytest.mark.parametrize(("size", "value_size"), [(64, 64), (80, 32), (128, 128), (192, 128)])
def test_the_memory_efficient_kernels_scratch_equals_that_of_the_estimate(size: int, value_size: int, *, half: bool):
    from zeroplan.dryrun.scratch import Heads, efficient_backward_bytes
    from zeroplan.transformer.blocks import Compute
    from zeroplan.transformer.families.attention import efficient_scratch, head_size
    from zeroplan.transformer.families.widths import key_parts, widths

    shape = tiny_config("llama") | {
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "head_dim": size,
        "hidden_size": 8 * size,
    }
    compute = Compute(element_bytes=2 if half else 4, autocast=False, attention="sdpa")
    for sequences, length in ((1, 64), (5, 200), (2, 4096), (40, 100)):
        batch = BatchSpec(micro_batch_size=sequences, seq_len=length)
        parts = key_parts(widths(model_from_config(shape), compute, batch))
        values = {
            "a": 8, "b": sequences, "s": length, "d": size, "T": sequences * length, "c": 8 * value_size, "c/a": value_size,
            "y": parts,
        }  # fmt: skip
        said = efficient_scratch(head_size(max(size, value_size)), half=half).value(values)
        of = Heads(8 * sequences, length, length, size, value_size)
        assert said == efficient_backward_bytes(of, half=half, dropout=False, capability=(9, 0))
