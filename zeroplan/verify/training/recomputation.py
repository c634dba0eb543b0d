"""Activation checkpointing of blocks: full, or selective, which keeps the outputs of expensive operators.

Selective recomputation is torch's ``create_selective_checkpoint_contexts`` with torchtitan's policy: it keeps the outputs of
attention kernels, of all-to-alls and of every second matrix product, beginning with a block's first. A product with a bias is
another operator (``addmm``), neither counted nor kept. Later torchtitan also keeps outputs of ``addmm``, ``bmm`` and ``topk``, and
never a router's.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager

import torch
from torch import nn
from torch._ops import OpOverload
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from zeroplan.spec.recipe import Recompute


def checkpoint_options(recompute: Recompute, *, reentrant: bool = False) -> dict[str, object]:
    """The keyword arguments of ``torch.utils.checkpoint.checkpoint``.

    The random-number state that a checkpoint saves is in host memory; on CPU tensors it would count. Selective recomputation
    runs to the block's end, as in torchtitan: stopped early, it would neither use nor free the last product that it kept.
    """
    options: dict[str, object] = {"use_reentrant": reentrant, "preserve_rng_state": False}
    if recompute == "selective":
        options |= {"context_fn": _contexts, "early_stop": False}
    return options


def recompute_blocks(blocks: Sequence[nn.Module], recompute: Recompute) -> None:
    """Make each block's backward rerun its forward, whole or except for expensive operators."""
    for block in blocks if recompute != "none" else ():
        block.forward = _checkpointed(block.forward, checkpoint_options(recompute))


def _checkpointed(forward: Callable[..., object], options: Mapping[str, object]) -> Callable[..., object]:
    def again(*args: object, **kwargs: object) -> object:
        return checkpoint(forward, *args, **options, **kwargs)  # type: ignore[arg-type]

    return again


def _contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    made: tuple[AbstractContextManager[None], AbstractContextManager[None]] = create_selective_checkpoint_contexts(
        every_second_product()
    )  # type: ignore[no-untyped-call]
    return made


Policy = Callable[..., CheckpointPolicy]


def every_second_product() -> Policy:
    """The policy for one call of one block: it counts products, in the forward and in the recomputation."""
    seen = {False: 0, True: 0}

    def policy(
        context: SelectiveCheckpointContext, operator: OpOverload, *_args: object, **_kwargs: object
    ) -> CheckpointPolicy:
        if operator is _PRODUCT:
            seen[context.is_recompute] += 1
            return _KEEP if seen[context.is_recompute] % 2 else _AGAIN
        return _KEEP if operator in _COSTLY else _AGAIN

    return policy


_KEEP, _AGAIN = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE
_PRODUCT = torch.ops.aten.mm.default
_COSTLY = frozenset({
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,  # torch prefers it on Hopper and later
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops._c10d_functional.all_to_all_single.default,
})  # fmt: skip
