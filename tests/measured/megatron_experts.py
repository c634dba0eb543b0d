"""The bytes that Megatron-LM's MoE layer saves for its backward: ``python -m tests.measured.megatron_experts CHECKOUT``.

The checkout is github.com/NVIDIA/Megatron-LM at commit d98e8a64dd (2026-08-22). Its layer runs forward on a CPU and one rank, one
expert after the other. Every row of ``megatron_experts.toml`` has a layer's settings, and the bytes of all storages that autograd
saves or that the dispatcher keeps as attributes. Left out: the layer's input and weights. The tests only read the rows.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import tomllib
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from unittest.mock import MagicMock
from weakref import WeakSet

from zeroplan.spec.batch import BatchSpec
from zeroplan.spec.described import JobParts
from zeroplan.spec.mesh import MeshSpec
from zeroplan.spec.model import ModelSpec, MoeSpec
from zeroplan.spec.recipe import MegatronOptions, RecipeSpec
from zeroplan.transformer.megatron import cost_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor, nn

ROWS = Path(__file__).with_suffix(".toml")
_WORDS = """# Bytes that Megatron-LM's own MoE layer (commit d98e8a64dd) saves and keeps by name: one rank, torch {torch}.
# Written by python -m tests.measured.megatron_experts. [bytes]
"""
HIDDEN, WIDTH, SEQ_LEN, SIZE = 64, 96, 32, 2
#: The dispatcher's attributes that keep tensors until the layer runs again.
_NAMED = ("probs", "routing_map", "local_map", "local_probs", "reversed_local_input_permutation_mapping")


class Asked(NamedTuple):
    """The settings of a layer, and its saved bytes."""

    dispatcher: str
    gated: bool
    deterministic: bool
    router_dtype: str
    """Empty: the dtype of activations."""
    aux_loss: bool
    experts: int
    per_token: int
    n_bytes: int = 0


def rows() -> list[Asked]:
    """Return the recorded layers."""
    return [Asked(**row) for row in tomllib.loads(ROWS.read_text(encoding="utf-8"))["layer"]]


def cases() -> Iterator[Asked]:
    """Yield the layers to run."""
    shapes = ((8, 2), (4, 3), (16, 4))
    both = (False, True)
    for dispatcher, gated, det, router, aux in product(("alltoall", "allgather"), both, both, ("", "fp32"), both):
        experts, per_token = shapes[(gated + 2 * det + aux + (router != "")) % len(shapes)]
        yield Asked(dispatcher, gated, det, router, aux, experts, per_token)


def estimated(asked: Asked) -> int:
    """Return zeroplan's estimate for the same layer, without its norm. [bytes]"""
    model = ModelSpec(
        family="mixtral", hidden_size=HIDDEN, intermediate_size=WIDTH, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=4, head_dim=16, vocab_size=128,
        moe=MoeSpec(num_experts=asked.experts, num_experts_per_tok=asked.per_token, moe_intermediate_size=WIDTH),
    )  # fmt: skip
    options = MegatronOptions(
        swiglu=asked.gated, moe_token_dispatcher_type=asked.dispatcher, moe_grouped_gemm=False, moe_aux_loss=asked.aux_loss,
        moe_router_dtype=asked.router_dtype or None, deterministic_mode=asked.deterministic,
    )  # fmt: skip
    recipe = RecipeSpec(engine="megatron", zero_stage=0, megatron=options)
    job = JobParts(model, recipe, MeshSpec(), BatchSpec(micro_batch_size=SIZE, seq_len=SEQ_LEN))
    lines = cost_of(job, "moe").kept
    return sum(int(line.n_bytes) for line in lines if line.reason.startswith(("experts: ", "router: ")))


# --- Megatron-LM's own -------------------------------------------------------------------------------------------------------


class _Packed:
    """Wraps a tensor that autograd saves. It is deleted when the graph releases it."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class _Nothing:
    """Replaces CUDA's streams and events on a CPU."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def wait_stream(self, *_: object) -> None: ...

    def record_event(self) -> _Nothing:
        return self

    def synchronize(self) -> None: ...


def _import_megatron(checkout: str) -> None:
    """Import Megatron-LM without CUDA and Triton, and create the process groups of one rank."""
    import torch
    import torch._dynamo
    import torch._inductor.utils
    import torch.distributed.tensor

    sys.path.insert(0, checkout)
    for name in ("triton", "triton.language"):  # Megatron-LM imports their decorators; the kernels never run
        sys.modules[name] = MagicMock(__spec__=None, __version__="3.0.0")
    torch.compile = lambda function=None, **_: function or (lambda made: made)
    torch.cuda.current_device = lambda: "cpu"
    torch.cuda.Stream = torch.cuda.Event = _Nothing
    torch.cuda.current_stream = lambda *_: _Nothing()
    torch.cuda.stream = lambda *_: nullcontext()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1")
    torch.distributed.init_process_group("gloo", rank=0, world_size=1)
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import random

    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    random.CudaRNGStatesTracker.fork = lambda *_, **__: nullcontext()


def _layer(asked: Asked) -> nn.Module:
    import torch
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig
    from torch.nn import functional

    config = TransformerConfig(
        num_layers=1, hidden_size=HIDDEN, num_attention_heads=4, ffn_hidden_size=WIDTH, moe_ffn_hidden_size=WIDTH,
        num_moe_experts=asked.experts, moe_router_topk=asked.per_token, moe_token_dispatcher_type=asked.dispatcher,
        moe_router_load_balancing_type="aux_loss", moe_aux_loss_coeff=0.01 if asked.aux_loss else 0.0, add_bias_linear=False,
        bf16=True, params_dtype=torch.bfloat16, gated_linear_unit=asked.gated, bias_activation_fusion=asked.gated,
        activation_func=functional.silu if asked.gated else functional.gelu, moe_router_dtype=asked.router_dtype or None,
        moe_grouped_gemm=False, use_cpu_initialization=True, gradient_accumulation_fusion=False,
    )  # fmt: skip
    made = get_gpt_layer_local_spec(num_experts=asked.experts, moe_grouped_gemm=False).submodules.mlp(config)
    made.set_layer_number(1)
    return made.to(torch.bfloat16).train()


def _saved(asked: Asked) -> int:
    """Return the size of all storages that autograd saves in a forward or that the dispatcher keeps. [bytes]"""
    import torch

    torch.use_deterministic_algorithms(asked.deterministic)
    layer, held = _layer(asked), WeakSet[_Packed]()
    given = torch.randn(SEQ_LEN, SIZE, HIDDEN, dtype=torch.bfloat16, requires_grad=True)

    def pack(tensor: Tensor) -> _Packed:
        packed = _Packed(tensor)
        held.add(packed)
        return packed

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed.tensor):
        output, _ = layer(given)
    gc.collect()
    named = (getattr(layer.token_dispatcher, name, None) for name in _NAMED)
    tensors = [*(packed.tensor for packed in held), *(one for one in named if isinstance(one, torch.Tensor))]
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}
    for own in (given, *layer.parameters()):
        storages.pop(own.untyped_storage().data_ptr(), None)
    del output
    return sum(storages.values())


def main() -> None:
    """Run every layer and write its row."""
    import torch

    _import_megatron(sys.argv[1])
    text = _WORDS.format(torch=torch.__version__)
    for asked in cases():
        found = asked._replace(n_bytes=_saved(asked))
        text += "\n[[layer]]\n" + "".join(f"{name} = {json.dumps(value)}\n" for name, value in found._asdict().items())
        print(found, estimated(found))
    ROWS.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
