"""Splits a causal language model of transformers over tensor-parallel ranks, as torchtitan's backend for such models does.

Attention is split by heads, the MLP by its width, embedding and head by the vocabulary, hidden states along the sequence.
Source: torchtitan, 2026-04, experiments/transformers_modeling_backend/infra/parallelize.py, ``apply_non_moe_tp``. Tied embeddings
stay tied, as in torchtitan's own models.
"""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from zeroplan.ledger import Phase
from zeroplan.spec.job import JobSpec
from zeroplan.verify.training.adapters import unwrapped
from zeroplan.verify.training.experts import ExpertMeshes
from zeroplan.verify.training.fsdp2 import Fsdp2
from zeroplan.verify.training.meshes import TENSOR, sharding_ranks
from zeroplan.verify.training.workload import Workload

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class TensorParallel(Fsdp2):
    """``fully_shard`` of a tensor-parallel part over the ranks that have the same part; the loss reads split logits."""

    def __init__(self, work: Workload, job: JobSpec, mesh: DeviceMesh, *, experts: ExpertMeshes | None = None) -> None:
        super().__init__(work, job.recipe, sharding_ranks(job, mesh), experts=experts)

    def micro_step(self, enter: Callable[[Phase], None], *, last: bool) -> None:
        """Run one forward and backward pass, with the loss of logits split by the vocabulary."""
        with loss_parallel():
            super().micro_step(enter, last=last)


def split(work: Workload, mesh: DeviceMesh, *, seq_len: int, along_sequence: bool) -> Workload:
    """Split a workload's model over tensor-parallel ranks; add positions to the batch, since no rank sees all tokens."""
    mesh = mesh[TENSOR]
    model = cast("PreTrainedModel", unwrapped(work.module))
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()  # type: ignore[no-untyped-call]
    tied = head.weight is embedding.weight
    split_module(model, work.blocks, mesh, along_sequence=along_sequence)
    if tied:
        head.weight = embedding.weight
    positions = torch.arange(seq_len, device=mesh.device_type).unsqueeze(0)
    return work._replace(batch={**work.batch, "position_ids": positions})


def split_module(module: nn.Module, blocks: Iterable[nn.Module], mesh: DeviceMesh, *, along_sequence: bool) -> None:
    """Split a model or a pipeline stage's part of one, whose missing modules are identities.

    Without ``along_sequence`` every rank has whole hidden states (AutoModel 36044ad, distributed/optimized_tp_plans.py).
    """
    root = _ROOT if along_sequence else _WHOLE_ROOT
    there = {name: style for name, style in root.items() if not isinstance(module.get_submodule(name), nn.Identity)}
    parallelize_module(module, mesh, there, src_data_rank=None)
    for block in blocks:
        parallelize_module(block, mesh, _plan(block) if along_sequence else _whole(block), src_data_rank=None)


_ROOT: dict[str, ParallelStyle] = {
    "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "model.norm": SequenceParallel(),
    "lm_head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
}


_WHOLE_ROOT: dict[str, ParallelStyle] = {
    "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
    "lm_head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
}
_WHOLE: dict[str, ParallelStyle] = {
    **{f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}, "self_attn.o_proj": RowwiseParallel(),
    **{f"mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")}, "mlp.down_proj": RowwiseParallel(),
}  # fmt: skip


def _whole(block: nn.Module) -> dict[str, ParallelStyle]:
    adapted = {name for name in _WHOLE if hasattr(block.get_submodule(name), "lora_A")}
    return {name: _WithAdapter(style) if name in adapted else style for name, style in _WHOLE.items()}


class _WithAdapter(ParallelStyle):
    """Splits a layer of peft's like the layer alone, with both matrices of its adapter.

    Source: AutoModel 36044ad, components/distributed/parallel_styles.py, ColwiseParallelLora and RowwiseParallelLora.
    """

    def __init__(self, style: ParallelStyle) -> None:
        super().__init__()
        self._style, self._dim = style, Shard(0 if isinstance(style, ColwiseParallel) else 1)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for part in (module.base_layer, module.lora_A.default, module.lora_B.default):  # type: ignore[union-attr]
            for name, parameter in list(part.named_parameters(recurse=False)):  # type: ignore[union-attr]
                placed = distribute_tensor(parameter, device_mesh, [self._dim], src_data_rank=None)
                part.register_parameter(name, nn.Parameter(placed, requires_grad=parameter.requires_grad))  # type: ignore[union-attr]
        if isinstance(self._style, ColwiseParallel):
            module.lora_A.default.register_forward_hook(_gathered)  # type: ignore[union-attr]
        given = self._style.input_layouts  # type: ignore[attr-defined]
        wanted = (Replicate(),) if isinstance(self._style, ColwiseParallel) else (Shard(-1),)
        return distribute_module(
            module, device_mesh, None,
            lambda mod, inputs, mesh: self._style._prepare_input_fn(given, wanted, mod, inputs, mesh),  # type: ignore[attr-defined]
            lambda mod, outputs, mesh: self._style._prepare_output_fn(  # type: ignore[attr-defined]
                self._style.output_layouts, self._style.use_local_output, mod, outputs, mesh  # type: ignore[attr-defined]
            ),
        )  # fmt: skip


def _gathered(_module: nn.Module, _given: object, output: DTensor) -> DTensor:
    return output.redistribute(output.device_mesh, [Replicate()])


def _plan(block: nn.Module) -> dict[str, ParallelStyle]:
    plan: dict[str, ParallelStyle] = {
        "input_layernorm": SequenceParallel(),
        "self_attn": PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": Shard(1)}, desired_input_kwarg_layouts={"hidden_states": Replicate()}
        ),
        "post_attention_layernorm": SequenceParallel(),
        "self_attn.q_proj": ColwiseParallel(),
        "self_attn.k_proj": ColwiseParallel(),
        "self_attn.v_proj": ColwiseParallel(),
        "self_attn.o_proj": RowwiseParallel(output_layouts=Shard(1)),
        **(_EXPERTS if hasattr(block.mlp, "experts") else _DENSE),
    }
    if hasattr(block.self_attn, "q_norm"):
        plan["self_attn.q_norm"] = plan["self_attn.k_norm"] = SequenceParallel(sequence_dim=2, use_local_output=True)
    return plan


_DENSE: dict[str, ParallelStyle] = {
    "mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
    "mlp.gate_proj": ColwiseParallel(),
    "mlp.up_proj": ColwiseParallel(),
    "mlp.down_proj": RowwiseParallel(output_layouts=Shard(1)),
}
#: Every rank runs the router on all tokens. transformers' dispatch splits the tokens over these ranks and returns all outputs.
_EXPERTS: dict[str, ParallelStyle] = {
    "mlp": PrepareModuleInputOutput(
        input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),),
        use_local_input=True, output_layouts=(Replicate(),), desired_output_layouts=(Shard(1),),
    ),
}  # fmt: skip
