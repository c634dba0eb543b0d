"""``torch.compile`` in a dry run: a compiled forward keeps for its backward what torch's own compiler keeps, to the byte."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.dryrun.running import SCRIPTS, Run, dry_run
from zeroplan.dryrun.task import DryRunTask, environment

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")

_BLOCK = 512
"""The allocator's smallest block. [bytes]"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture(scope="module")
def run(folder: Path) -> Run:
    return dry_run("--steps", "4", "--", str(SCRIPTS / "compiled.py"), "left.json", folder=folder)


@pytest.fixture(scope="module")
def eager(folder: Path) -> Run:
    return dry_run("--steps", "4", "--eager", "--", str(SCRIPTS / "compiled.py"), "eager.json", folder=folder)


def kept_by_torch(*, recompute: bool) -> int:
    """Return what inductor's forward graph returns beyond its inputs, on the CPU with real tensors, in allocator blocks. [bytes]"""
    from functorch.compile import make_boxed_func
    from torch._inductor.compile_fx import compile_fx

    from tests.dryrun.scripts.compiled import Net, batch

    kept: list[int] = []

    def run_graph(graph: torch.fx.GraphModule, *_: object, is_backward: bool = False, **__: object) -> object:
        def run(*given: object) -> object:
            returned = graph(*given)
            mine = {one.untyped_storage()._cdata for one in given if isinstance(one, torch.Tensor)}
            found = {one.untyped_storage()._cdata: one.untyped_storage() for one in returned if isinstance(one, torch.Tensor)}
            kept.extend(storage.nbytes() for key, storage in found.items() if key not in mine and not is_backward)
            return returned

        return make_boxed_func(run)

    torch._dynamo.reset()
    compiled = torch.compile(
        Net(recompute=recompute), backend=lambda graph, inputs: compile_fx(graph, inputs, inner_compile=run_graph)
    )
    compiled(*batch("cpu"))
    return sum(-(-n_bytes // _BLOCK) * _BLOCK for n_bytes in kept)


@pytest.mark.parametrize("recompute", [False, True])
def test_a_compiled_forward_keeps_what_torchs_partitioner_saves(run: Run, eager: Run, folder: Path, *, recompute: bool):
    """With and without activation checkpointing, which the partitioner decides within a graph."""
    assert (run.code, eager.code) == (0, 0)
    left = json.loads((folder / "left.json").read_text())[f"recompute {recompute}, step 1"]
    assert left == kept_by_torch(recompute=recompute)
    assert left < json.loads((folder / "eager.json").read_text())[f"recompute {recompute}, step 1"]


def test_the_answer_names_replaced_kernels_and_whether_eager_left_the_compiler_out(run: Run, eager: Run):
    replaced = {one["what"]: one["by"] for one in run.answer["stood_in"]}
    assert replaced == {"torch.compile's own kernels": "inductor plans their buffers, and they are not launched"}
    left_out = {one["what"]: one["by"] for one in eager.answer["stood_in"]}
    assert left_out == {"torch.compile": "left out, the code runs uncompiled (--eager)"}
    assert (run.answer["compiler_left_out"], eager.answer["compiler_left_out"]) == (False, True)


def test_activations_of_a_graph_have_modules_and_lines_of_the_users_code(run: Run):
    modules = {one["name"]: one["kind"] for one in run.answer["modules"]}
    assert {"blocks.1.gate", "blocks.2.qkv", "head"} <= set(modules)
    lines = {one["name"] for one in run.answer["lines"] if one["kind"] == "activations"}
    assert all(
        line.startswith(("compiled.py:", "dryrun/scripts/compiled.py:")) or "scripts/compiled.py:" in line for line in lines
    )


ATTENTION = """
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
class Block(nn.Module):
    def __init__(self, masked):
        super().__init__()
        self.qkv, self.masked = nn.Linear(64, 192), masked
    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
        mask = torch.ones(64, 64, dtype=torch.bool, device="cuda").tril() if self.masked else None
        return x + scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None).transpose(1, 2).flatten(2)
blocks = nn.Sequential(*[Block(masked) for masked in (False, True)]).cuda()
for block in blocks:
    block.compile(fullgraph=True)
optimizer = torch.optim.SGD(blocks.parameters(), lr=1e-3)
with torch.autocast("cuda", torch.bfloat16):
    blocks(torch.randn(2, 64, 64, device="cuda")).square().mean().backward()
optimizer.step()
print("graph breaks", dict(torch._dynamo.utils.counters["graph_break"]))
"""


def test_attention_is_traced_within_the_graph(tmp_path: Path):
    """With ``fullgraph`` a break would end the script. The mask excludes the flash kernel."""
    (tmp_path / "script.py").write_text(ATTENTION)
    run = dry_run("--", "script.py", folder=tmp_path, flags=("--json",))
    assert run.code == 0, run.errors
    assert "graph breaks {}" in run.errors


LAYERS = """
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
import torch.distributed as dist
dist.init_process_group("nccl")
torch.cuda.set_device(1)
class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)
    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(x)))
layers = nn.Sequential(*[Layer() for _ in range(10)]).cuda()
for layer in layers:
    layer.compile(fullgraph=True)
    fully_shard(layer)
fully_shard(layers)
optimizer = torch.optim.SGD(layers.parameters(), lr=1e-3, momentum=0.9)
step = torch.compile(optimizer.step, options={"triton.cudagraphs": True, "wrap_inductor_compiled_regions": True})
calls = torch._dynamo.utils.counters
for length in (32, 48, 64):
    loss = layers(torch.randn(4, length, 64, device="cuda")).square().mean()
    loss.backward()
    step()
    optimizer.zero_grad()
    print("frames", calls["frames"]["ok"], torch.cuda.current_device())
"""


def test_all_layers_under_fsdp_share_one_graph(tmp_path: Path):
    (tmp_path / "script.py").write_text(LAYERS)
    run = dry_run("--gpus", "8", "--as-rank", "1", "--", "script.py", folder=tmp_path, flags=("--json",))
    replaced = {one["what"] for one in run.answer["stood_in"]}
    assert replaced == {"torch.compile's own kernels", "CUDA graphs"}, run.errors
    frames = [int(line.split()[1]) for line in run.errors.splitlines() if line.startswith("frames")]
    assert frames[0] <= 6, run.errors
    assert any(one["name"].startswith("9.") for one in run.answer["modules"])


def test_the_compilers_own_error_names_the_way_out():
    from torch._dynamo.exc import TorchRuntimeError

    from zeroplan.dryrun.failures import failure

    said = failure(TorchRuntimeError("graph break in fullgraph"))
    assert said.cause == "script"
    assert said.text.endswith("graph break in fullgraph; add --eager to leave torch.compile out")
    assert "--eager" not in failure(RuntimeError("shapes differ")).text


FORCED = """
import sys, torch, torch._dynamo
from zeroplan.dryrun.compiling import tracing
tracing.TorchDispatchMode = object  # as in a release whose modes know nothing of a compiler
from zeroplan.dryrun import child
sys.argv = ["child", sys.argv[1]]
child.main()
"""


def test_with_a_torch_whose_compiler_cannot_be_traced_the_script_runs_uncompiled(eager: Run, folder: Path):
    task = DryRunTask(
        target=str(SCRIPTS / "compiled.py"), arguments=(str(folder / "other.json"),), gpus=1, gpus_per_node=8, steps=4,
        gpu="h100-sxm-80gb", answer=str(folder / "answer.json"),
    )  # fmt: skip
    (folder / "task.json").write_text(json.dumps(asdict(task)))
    said = {**os.environ, **environment(task)}
    command = [sys.executable, "-c", FORCED, str(folder / "task.json")]
    subprocess.run(command, cwd=folder, env=said, capture_output=True, check=True, timeout=300)
    found = json.loads((folder / "answer.json").read_text())["run"]
    ((what, by),) = {(one["what"], one["by"]) for one in found["stood_in"]}
    why = f"torch {torch.__version__} compiles nothing while a dispatch mode is active"
    assert (what, by) == ("torch.compile", f"left out, the code runs uncompiled ({why})")
    assert max(phase["peak_bytes"] for phase in found["steps"][-1]["phases"]) == eager.peak_bytes
