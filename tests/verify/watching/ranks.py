"""Runs every engine on real ranks over gloo and as each rank of a fake group, with one process per rank.

Run as ``python -m tests.verify.watching.ranks FOLDER torch`` (or ``deepspeed``, which patches torch for good). The file
``TRANSPORT-RANKS-RANK.json`` in the folder says what each case took.
The processes are forks of one that has done all imports, since imports take most of the time.
"""

import gc
import json
import os
import sys
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.combined import every_case
from zeroplan.catalog.model import model
from zeroplan.measurement import Measurement
from zeroplan.spec.batch import BatchSpec
from zeroplan.spec.job import JobSpec
from zeroplan.spec.mesh import MeshSpec
from zeroplan.spec.model import ModelSpec
from zeroplan.spec.recipe import DdpOptions, DeepSpeedOptions, RecipeSpec

STEPS = 3
#: Numbers of ranks. Four allow two replicas of two shards, and two shards of two tensor-parallel ranks.
RANKS = {"torch": (2, 4) if every_case() else (4,), "deepspeed": (2, 4) if every_case() else (2,)}
GPT2 = model("gpt2")
SPLIT = ModelSpec(
    family="llama", hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    head_dim=8, vocab_size=64,
)  # fmt: skip


def _job(engine: str, stage: int, *, accumulate: int = 1, **recipe: Any) -> JobSpec:
    made = RecipeSpec(engine=engine, zero_stage=stage, **recipe)  # type: ignore[arg-type]
    return JobSpec(model=GPT2, recipe=made, batch=BatchSpec(seq_len=64, grad_accum_steps=accumulate))


_SMALL = DeepSpeedOptions(reduce_bucket_size=40_000)
_TORCH = {
    "fsdp2, stage 3": _job("fsdp2", 3),
    "fsdp2, stage 2, accumulation without reduction": _job("fsdp2", 2, accumulate=2, sync_every_micro_batch=False),
    "fsdp2, two replicas": _job("fsdp2", 3, precision="fp32"),
    "fsdp2, tensor-parallel": JobSpec(model=SPLIT, batch=BatchSpec(micro_batch_size=2, seq_len=16)),
    "ddp": _job("ddp", 0),
    "ddp, bucket views, accumulation": _job("ddp", 0, accumulate=2, ddp=DdpOptions(gradient_as_bucket_view=True)),
    "ddp, stage 1": _job("ddp", 1, precision="bf16"),
}
_DEEPSPEED = {f"deepspeed, stage {stage}": _job("deepspeed", stage, deepspeed=_SMALL) for stage in (0, 1, 2, 3)}
CASES = {"torch": _TORCH, "deepspeed": _DEEPSPEED}


def on(name: str, ranks: int) -> JobSpec:
    """Return a case on this number of ranks."""
    replicas, tensor = 2 if "replicas" in name else 1, 2 if "tensor" in name else 1
    return replace(
        (_TORCH | _DEEPSPEED)[name], mesh=MeshSpec(dp_shard=ranks // (replicas * tensor), dp_replicate=replicas, tp=tensor)
    )


def can_be(name: str, rank: int) -> bool:
    """Whether a fake group can show this rank on real tensors.

    In DeepSpeed's stage 3 the last rank is left with uninitialised memory, finds an overflow there and skips its steps.
    """
    return rank == 0 or name != "deepspeed, stage 3"


def main(folder: Path, library: str) -> None:
    """Measure every case of a library's engines on every rank."""
    import torch
    import torch._dynamo  # optimizers import it in their first step
    import transformers.models.llama.modeling_llama  # noqa: F401

    import zeroplan.verify.backends.cpu

    if library == "deepspeed":
        import zeroplan.verify.training.deepspeed  # noqa: F401
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    for ranks in RANKS[library]:
        for transport in ("gloo", "fake"):
            children = [_child(folder, library, transport, ranks, rank) for rank in range(ranks)]
            codes = [os.waitpid(child, 0)[1] for child in children]
            if any(codes):
                sys.exit(f"ranks of {transport} on {ranks} ended with {codes}")


def _child(folder: Path, library: str, transport: str, ranks: int, rank: int) -> int:
    child = os.fork()
    if not child:
        try:
            answer = _answer(CASES[library], transport, ranks, rank, folder / f"store-{ranks}")
            (folder / f"{transport}-{ranks}-{rank}.json").write_text(json.dumps(answer), encoding="utf-8")
        except BaseException:  # noqa: BLE001  whatever it is, the process must not go on as its parent
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return child


def _answer(cases: dict[str, JobSpec], transport: Any, ranks: int, rank: int, store: Path) -> dict[str, object]:
    from torch.distributed import FileStore, HashStore  # type: ignore[attr-defined]

    from zeroplan.verify.watching.cycles import manual_garbage_collection
    from zeroplan.verify.watching.group import join

    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": "lo"}
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), **meeting)
    met = FileStore(str(store), ranks) if transport == "gloo" else HashStore()
    log = join(transport, met, rank=rank, ranks=ranks, timeout_s=100)
    names = [name for name in cases if transport == "gloo" or can_be(name, rank)]
    with manual_garbage_collection():  # set once for all runs, each of which collects many times
        return {name: _figures(_measured(name, ranks, rank, transport, log)) for name in names}


def _measured(name: str, ranks: int, rank: int, transport: Any, log: Any) -> Measurement:
    from zeroplan.verify.backends.cpu import measured

    log.calls.clear()
    job = on(name, ranks)
    return measured(
        job,
        _work if job.mesh.tp == 1 else lambda: _split(job),
        rank=rank,
        transport=transport,
        log=log,
        steps=STEPS,
        say=lambda _: None,
    )


def _split(job: JobSpec) -> Any:
    """Return the job's own model with weights: tensor parallelism splits it by the names of its parts."""
    import torch

    from zeroplan.verify.training.workload import with_weights, workload

    return with_weights(workload(job, dtype=torch.float32))


def _work() -> Any:
    """Return a module whose tensors do not divide evenly over the ranks, its batch and its loss."""
    import torch
    from torch import nn

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(63, 97)
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(97, 201), nn.GELU(), nn.Linear(201, 97)) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x.to(self.first.weight.dtype))
            for layer in self.layers:
                x = x + layer(x)
            return x.float().pow(2).mean()

    from zeroplan.verify.training.workload import Workload

    torch.manual_seed(0)
    module = Net()
    return Workload(module, {"x": torch.randn(16, 63)}, lambda output: output, tuple(module.layers))  # type: ignore[arg-type, return-value]


def _figures(measured: Measurement) -> dict[str, object]:
    steps = [[[phase.phase, phase.peak_bytes, phase.kinds] for phase in step.phases] for step in measured.steps]
    return {
        "peaks": steps,
        "held": [[step.held_bytes, step.held_kinds] for step in measured.steps],
        "collectives": sorted(str(one) for one in measured.collectives),
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
