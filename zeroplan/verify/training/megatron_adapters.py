"""Adds adapters to Megatron-Core's GPT as ms-swift does, with Megatron-Core's own matrices in place of Transformer Engine's.

Source: mcore-bridge 1.6.5, tuners/lora.py, LoraParallelLinear, and model/gpt_model.py, GPTModel._preprocess, which makes the
embedding's output need a gradient.
"""

from copy import copy

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from torch import nn

from zeroplan.spec.job import JobSpec
from zeroplan.transformer.megatron import adapted_matrices

_DROPOUT = 0.05
_Output = tuple[torch.Tensor, torch.Tensor | None]


class Adapted(nn.Module):
    """A frozen matrix and its adapter."""

    def __init__(self, base: ColumnParallelLinear | RowParallelLinear, *, rank: int, dropout: bool) -> None:
        super().__init__()
        config, self.base = base.config, base
        arguments = {
            "config": config, "init_method": config.init_method, "bias": False, "skip_bias_add": True, "is_expert": base.is_expert,
        }  # fmt: skip
        self.first: nn.Module
        self.second: nn.Module
        if isinstance(base, RowParallelLinear):
            self.first = RowParallelLinear(base.input_size, rank, input_is_parallel=True, **arguments)
            self.second = nn.Linear(rank, base.output_size, bias=False, dtype=config.params_dtype)
        else:
            self.first = nn.Linear(base.input_size, rank, bias=False, dtype=config.params_dtype)
            self.second = ColumnParallelLinear(rank, base.output_size, gather_output=False, **arguments)
        for parameter in (*self.first.parameters(), *self.second.parameters()):
            parameter.allreduce = not (base.is_expert and config.expert_model_parallel_size > 1)  # type: ignore[attr-defined]
        self.dropout = nn.Dropout(_DROPOUT) if dropout else nn.Identity()

    def forward(self, given: torch.Tensor) -> _Output:
        """Return the matrix's output with the adapter's, scaled, and the bias."""
        made, bias = self.base(given)
        inner = self.first(self.dropout(given))
        outer = self.second(inner[0] if isinstance(inner, tuple) else inner)
        outer = (outer[0] if isinstance(outer, tuple) else outer) * 4.0
        return made + outer, bias


class TrainedCopy(nn.Module):
    """A module that is trained whole, beside its frozen original (peft 0.21, utils/other.py, ModulesToSaveWrapper)."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        self.copy = copy(original)  # a deep copy would copy process groups
        self.copy._parameters = {
            name: None if one is None else _copied(one) for name, one in original._parameters.items()
        }  # fmt: skip
        self.original = original

    def forward(self, *given: object, **options: object) -> object:
        """Run the copy."""
        return self.copy(*given, **options)


def _copied(parameter: nn.Parameter) -> nn.Parameter:
    made = nn.Parameter(parameter.detach().clone())
    vars(made).update(vars(parameter))  # Megatron-Core stores attributes on parameters
    return made


def adapt(model: GPTModel, job: JobSpec) -> None:
    """Freeze the model, and add the job's adapters and trained copies of modules."""
    adapter = job.model.adapter
    if adapter is None:
        return
    model.requires_grad_(False)
    names = adapted_matrices(job.model)
    found = [(module, name) for module in model.modules() for name, _ in module.named_children() if name in names]
    for module, name in found:
        setattr(module, name, Adapted(getattr(module, name), rank=adapter.rank, dropout=adapter.dropout))
    if adapter.trains("embedding") and model.pre_process:
        model.embedding.word_embeddings = TrainedCopy(model.embedding.word_embeddings)
    if adapter.trains("head") and model.post_process:
        model.output_layer = TrainedCopy(model.output_layer)
    if model.pre_process:
        model.embedding.register_forward_hook(_tracked)


def _tracked(_module: nn.Module, _given: object, made: torch.Tensor) -> torch.Tensor:
    return made.requires_grad_(True) if torch.is_grad_enabled() and not made.requires_grad else made
