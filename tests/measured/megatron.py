"""Run Megatron-Core's own code on fake tensors: ``python -m tests.measured.megatron`` from the repository's root.

Every job of a small sample of GPTs takes two steps and leaves a row in ``megatron.toml``: what CUDA's allocator has handed out
at the peak of the second one, and what it has reserved. It needs megatron-core (``pip install --no-deps megatron-core==0.16.1``);
the tests read the rows alone.

The layers are Megatron's local ones: Transformer Engine and Apex run on CUDA alone. Three kernels that ask torch for next to
nothing have a stand-in: the one that adds a weight's gradient to the main gradients, the norm of all gradients, and fused Adam
(torch's). Nothing is compiled by ``torch.compile``, so its fusions are off.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tomllib
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, NamedTuple

from zeroplan import Phase, job

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor, nn

    from zeroplan.spec.job import JobSpec
    from zeroplan.verify.watching.recording import Recording
    from zeroplan.verify.watching.tracker import Tracker

ROWS = Path(__file__).with_name("megatron.toml")
SEED, COUNT = 20_267, 16
_STEPS = 2
_MODELS = ("gpt2", "gpt2-medium", "gpt2-large")
_SHAPES = ((1, 512), (8, 512), (4, 1024), (3, 1000), (1, 1024), (16, 256))
_WORDS = """# What CUDA's allocator has handed out and reserved for Megatron-Core {version}'s own code: local layers, no dropout,
# fake tensors, torch {torch}. Written by python -m tests.measured.megatron. [bytes]
"""


class Measured(NamedTuple):
    """A row: a job in the words of :func:`zeroplan.job`, and what its last step took at most. [bytes]"""

    said: dict[str, object]
    overlap: bool
    """Whether reductions and gathers run beside the passes."""
    peak_bytes: int
    reserved_bytes: dict[str, int]
    """By the allocator's settings."""

    @property
    def job(self) -> JobSpec:
        """The job, with local layers and without dropout."""
        return _job(self.said, overlap=self.overlap)


def rows() -> list[Measured]:
    """What is kept of all runs."""
    return [Measured(**row) for row in tomllib.loads(ROWS.read_text(encoding="utf-8"))["run"]]


def drawn(count: int = COUNT) -> Iterator[tuple[dict[str, object], bool]]:
    """The sample, the same on every machine."""
    dice = random.Random(SEED)  # noqa: S311  a sample, not a secret
    for _ in range(count):
        micro_batch, seq_len = _SHAPES[int(dice.random() * len(_SHAPES))]
        said = {"model": _MODELS[int(dice.random() * len(_MODELS))], "micro_batch": micro_batch, "seq_len": seq_len}
        for name, choices in (
            ("gpus", (2, 8, 64, 512)), ("stage", (0, 1)), ("recompute", ("none", "none", "selective", "full")),
            ("grad_accum", (1, 2)), ("tensor_parallel", (1, 1, 2)),
        ):  # fmt: skip
            said[name] = choices[int(dice.random() * len(choices))]
        yield said, dice.random() < 0.5


def _job(said: dict[str, object], *, overlap: bool) -> JobSpec:
    found = job(engine="megatron", attention="eager", **said)
    options = replace(
        found.recipe.megatron, transformer_impl="local", hidden_dropout=False, attention_dropout=False,
        overlap_grad_reduce=overlap, overlap_param_gather=overlap and found.recipe.zero_stage == 1,
    )  # fmt: skip
    return replace(found, recipe=replace(found.recipe, megatron=options))


# --- what stands in for CUDA ------------------------------------------------------------------------------------------------


@contextmanager
def _alone() -> Iterator[None]:
    """What ranks tell each other in Python objects is what this one says; a tensor's type is CUDA's."""
    import torch
    from torch import distributed

    from zeroplan.verify.replaced import replaced

    with (
        replaced(torch.Tensor, "type", _type_of(torch.Tensor.type)),
        replaced(distributed, "all_gather_object", _gathered),
        replaced(distributed, "barrier", lambda *_, **__: None),
    ):
        yield


def _type_of(original: object) -> object:
    """Megatron's optimizers ask for a type's name, and know those on CUDA."""
    import torch

    names = {torch.bfloat16: "BFloat16", torch.float16: "Half", torch.float32: "Float"}

    def found(tensor: Tensor, *args: object, **options: object) -> object:
        return original(tensor, *args, **options) if args or options else f"torch.cuda.{names[tensor.dtype]}Tensor"

    return found


def _gathered(found: list[object], own: object, **_: object) -> None:
    """Every rank says the same."""
    found[:] = [own] * len(found)


def _import_megatron() -> None:
    """Import Megatron-Core with nothing compiled, and put stand-ins where its kernels read values or are CUDA alone."""
    import torch

    from zeroplan.verify.replaced import replaced

    kernel = sys.modules["fused_weight_gradient_mlp_cuda"] = ModuleType("fused_weight_gradient_mlp_cuda")
    kernel.wgrad_gemm_accum_fp32 = kernel.wgrad_gemm_accum_fp16 = lambda *_: None  # they write into the main gradients
    with replaced(torch, "compile", lambda function: function):
        import megatron.core.optimizer as optimizers
        from megatron.core.distributed import param_and_grad_buffer
        from megatron.core.optimizer import optimizer
        from megatron.core.tensor_parallel import random as states
    optimizers.Adam = _adam
    optimizer.get_grad_norm_fp32 = lambda *_, **__: 0.0
    param_and_grad_buffer._coalescing_manager = _together
    states.CudaRNGStatesTracker.fork = states._fork_rng = lambda *_: nullcontext()
    states.CudaRNGStatesTracker.add = states._set_all_rng_states = lambda *_: None
    states._get_all_rng_states = tuple


def _adam(groups: object, *, lr: float, weight_decay: float, betas: tuple[float, float], eps: float, **_: object) -> object:
    import torch

    return torch.optim.AdamW(groups, lr=lr, weight_decay=weight_decay, betas=betas, eps=eps, fused=True)


@contextmanager
def _together(*_: object, **__: object) -> Iterator[object]:
    """Collectives one by one, in a process group that moves nothing."""
    yield SimpleNamespace(wait=lambda *_: None)


# --- a run ------------------------------------------------------------------------------------------------------------------


def _recorded(asked: JobSpec) -> Recording:
    """Train for a few steps as the first rank."""
    from zeroplan.verify.fake_cuda.fake_tensors import fake_tensors
    from zeroplan.verify.fake_cuda.installed import CUDA, install_node
    from zeroplan.verify.training.run import fake_ranks
    from zeroplan.verify.watching.tracker import Tracker

    install_node()
    tracker = Tracker(device=CUDA)
    _import_megatron()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    plain = replace(asked, mesh=replace(asked.mesh, dp_shard=asked.mesh.world_size, tp=1))  # Megatron makes its own groups
    with fake_ranks(plain, 0, CUDA), fake_tensors(tracker, CUDA), _alone(), tracker:
        parallel_state.initialize_model_parallel(asked.mesh.tp, create_gloo_process_groups=False)
        model_parallel_cuda_manual_seed(1)
        _train(asked, tracker, CUDA)
        parallel_state.destroy_model_parallel()
    return tracker.recording


def _train(asked: JobSpec, tracker: Tracker, device: str) -> None:
    """Megatron-LM's loop: gradients to zero, micro-batches, gradients reduced, step (megatron/training/training.py, train_step)."""
    from megatron.core.distributed import finalize_model_grads

    model, optimizer = _built(asked, device)
    for step in range(_STEPS):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        for micro in range(1, asked.batch.grad_accum_steps + 1):
            with nullcontext() if micro == asked.batch.grad_accum_steps else model.no_sync():
                _micro_step(asked, model, tracker, device, step)
        tracker.enter(Phase.STEP, step)
        finalize_model_grads([model])
        optimizer.step()
    tracker.enter(Phase.INIT, _STEPS)


def _micro_step(asked: JobSpec, model: nn.Module, tracker: Tracker, device: str, step: int) -> None:
    import torch

    size = asked.batch.micro_batch_size, asked.batch.seq_len
    tracker.enter(Phase.FORWARD, step)
    tokens, labels, positions = (torch.zeros(size, dtype=torch.long, device=device) for _ in range(3))
    counted = torch.ones(size, device=device)
    mask = torch.zeros(1, 1, size[1], size[1], dtype=torch.bool, device=device)
    losses = model(tokens, positions, mask, labels=labels)
    loss = (losses.float().view(-1) * counted.view(-1)).sum() / counted.sum()
    del losses
    tracker.enter(Phase.BACKWARD, step)
    loss.backward()


def _built(asked: JobSpec, device: str) -> tuple[nn.Module, object]:
    """The model as ``pretrain_gpt.py`` builds it, in Megatron's DDP, and its optimizer."""
    import torch
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer.module import Float16Module

    config, shape, options = _config(asked), asked.model, asked.recipe.megatron
    padded = -(-shape.vocab_size // (128 * asked.mesh.tp)) * 128 * asked.mesh.tp
    with torch.device(device):
        model = GPTModel(
            config, get_gpt_layer_local_spec(), vocab_size=padded,
            max_sequence_length=shape.positions, parallel_output=True,
            share_embeddings_and_output_weights=shape.tie_word_embeddings,
        )  # fmt: skip
    shared, buckets = asked.recipe.zero_stage == 1, max(40_000_000, 1_000_000 * asked.mesh.world_size // asked.mesh.tp)
    both = {"use_distributed_optimizer": shared, "overlap_param_gather": options.overlap_param_gather}
    wrapped = DistributedDataParallel(
        config,
        DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, overlap_grad_reduce=options.overlap_grad_reduce, check_for_nan_in_grad=False,
            bucket_size=buckets if options.overlap_grad_reduce else None, **both,
        ),
        Float16Module(config, model),
    )  # fmt: skip
    stepped = OptimizerConfig(optimizer="adam", lr=1e-4, bf16=True, params_dtype=torch.bfloat16, clip_grad=0.0, **both)
    return wrapped, get_megatron_optimizer(stepped, [wrapped], use_gloo_process_groups=False)


def _config(asked: JobSpec) -> object:
    import torch
    from megatron.core.transformer import TransformerConfig

    shape = asked.model
    recomputed = {
        "none": {},
        "selective": {"recompute_granularity": "selective"},
        "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    }[asked.recipe.recompute]
    return TransformerConfig(
        num_layers=shape.num_hidden_layers, hidden_size=shape.hidden_size, num_attention_heads=shape.num_attention_heads,
        num_query_groups=shape.num_key_value_heads, ffn_hidden_size=shape.intermediate_size, kv_channels=shape.head_dim,
        hidden_dropout=0.0, attention_dropout=0.0, bf16=True, params_dtype=torch.bfloat16, perform_initialization=False,
        gradient_accumulation_fusion=True, bias_activation_fusion=True, bias_dropout_fusion=True, masked_softmax_fusion=False,
        attention_softmax_in_fp32=False,
        tensor_model_parallel_size=asked.mesh.tp, sequence_parallel=asked.recipe.sequence_parallel, **recomputed,
    )  # fmt: skip


def _measured(said: dict[str, object], *, overlap: bool) -> str:
    """Run a job in this process; its row."""
    from zeroplan.engines.device import workspace
    from zeroplan.verify.watching.replay import Replays

    asked = _job(said, overlap=overlap)
    workspace_bytes, _ = workspace(asked.cluster.gpu)
    recording = _recorded(asked)
    found = Replays.of(recording, workspace_bytes=workspace_bytes).measured(recording, workspace_bytes=workspace_bytes)
    return _row(Measured(said, overlap, found[0].allocated_bytes, {one.settings: one.reserved_bytes for one in found}))


def _row(found: Measured) -> str:
    def table(one: dict[str, object]) -> str:
        return "{ " + ", ".join(f"{key} = {json.dumps(value)}" for key, value in one.items()) + " }"

    return (
        f"\n[[run]]\nsaid = {table(found.said)}\noverlap = {json.dumps(found.overlap)}\npeak_bytes = {found.peak_bytes}\n"
        f"reserved_bytes = {table(found.reserved_bytes)}\n"
    )


def main() -> None:
    """Run the sample and write all rows."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cases", type=int, default=COUNT, help="how many of the sample's jobs")
    cases = list(drawn(parser.parse_args().cases))
    text = _WORDS.format(version=version("megatron-core"), torch=version("torch"))
    for number, (said, overlap) in enumerate(cases, 1):
        text += _measured(said, overlap=overlap)
        print(f"{number} of {len(cases)}", flush=True)
    ROWS.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
