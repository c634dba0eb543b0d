"""The memory that blocks of Megatron-LM's states take beyond the states' bytes.

CUDA's allocator counts whole blocks, and does not split a block if less than a MiB would be left. This module places weights, main
gradients, fp32 copies of the weights and Adam's moments in the order in which the last rank makes them. Without the distributed
optimizer, each state has one tensor per parameter, except the main gradients with one tensor per chunk. Left out: other temporary
tensors of the first steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.measured.megatron_golden import tokens_of
from zeroplan.allocator import CachingAllocator, counted_bytes
from zeroplan.numeric import round_up

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.measured.megatron_golden import Features, Run

#: Classes of models whose tensors this module lists.
PLACED = ("dense-gpt", "bert", "t5")


def placed(run: Run) -> bool:
    """Whether a run has one tensor per state and parameter, without expandable segments, so that this module can place them."""
    return run.kind in PLACED and not any(run.features.get(name) for name in ("dist_opt", "expandable"))


def beyond(run: Run) -> int:
    """Return the bytes that blocks of the states take beyond the states; 0 for a run that is not placed. [bytes]"""
    if not placed(run):
        return 0
    chunks = list(_chunks(run, tokens_of(run)))
    narrow, wide = (2, 2) if run.features["precision"] == "fp16" else (2, 4)
    card, kept = CachingAllocator(), list[tuple[int, int]]()

    def hold(n_bytes: int) -> None:
        kept.append((card.request(n_bytes).size, counted_bytes(n_bytes)))

    every = [one for chunk in chunks for one in chunk]
    for one in every:
        hold(narrow * one)
    for chunk in chunks:
        hold(wide * sum(chunk))
    for one in every:
        passing = card.request(narrow * one)  # ``clone().float()``
        hold(4 * one)
        card.release(passing)
    for one in (one for one in every if wide == 2):
        hold(4 * one)  # fp32 gradients; the first step makes them before Adam's moments
    for one in every:
        hold(4 * one)
        hold(4 * one)
    return sum(block - asked for block, asked in kept)


def _chunks(run: Run, vocabulary: int) -> Iterator[list[int]]:
    """Yield the elements of every tensor of the last rank, chunk by chunk of the pipeline."""
    said, hidden = run.features, run.features["hidden"]
    last, parts = said["pp"] > 1, said.get("vpp") or 1
    table = round_up(vocabulary, said["vocab_multiple"] * said["tp"]) * hidden // said["tp"]
    positions = [said["max_positions"] * hidden] if said["position"] == "learned_absolute" else []
    first, norm = [] if last else [table, *positions], [hidden, hidden]
    layer, layers = _layer(said), said["layers"] // said["pp"] // parts
    yield from [layers * layer] * (parts - 1)
    if run.kind == "t5":
        decoder = [*layer[:6], *norm, *_across(said), *layer[6:]]
        yield [*first, *(layers * layer), *norm, *(layers * decoder), *norm, table // hidden]
    elif run.kind == "bert":
        dense = [hidden * hidden, hidden]
        binary = [] if "bert-no-binary-head" in run.arguments else [2 * hidden, 2, *dense]
        yield [*first, *(layers * layer), *norm, *dense, *norm, *([table] if last else []), table // hidden, *binary]
    else:
        yield [*first, *(layers * layer), *norm, *([table] if last else [])]


def _layer(said: Features) -> list[int]:
    """Return the elements of every tensor of a layer, in the order of its modules."""
    hidden, tp = said["hidden"], said["tp"]
    queries, keys = said["heads"] * said["head_dim"], said["kv_groups"] * said["head_dim"]
    joint, width = queries + 2 * keys, said["ffn"]
    up = (2 if said["act"] == "swiglu" else 1) * width
    return [
        queries * hidden // tp, hidden, hidden, hidden, joint * hidden // tp, joint // tp,
        hidden, hidden, up * hidden // tp, up // tp, width * hidden // tp, hidden,
    ]  # fmt: skip


def _across(said: Features) -> list[int]:
    """Return the elements of every tensor of a decoder layer's cross attention."""
    hidden, tp = said["hidden"], said["tp"]
    width = said["heads"] * said["head_dim"]
    return [width * hidden // tp, hidden, width * hidden // tp, width // tp, 2 * width * hidden // tp, 2 * width // tp]
