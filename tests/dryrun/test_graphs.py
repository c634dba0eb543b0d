"""CUDA graphs in a dry run: a capture has its own memory pool, which stays reserved as long as the graph exists."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from tests.dryrun.running import Run, dry_run
from zeroplan.units import MIB

pytestmark = pytest.mark.torch
pytest.importorskip("torch")

#: Sets cuBLAS's workspaces to 8 MiB per handle and stream.
WORKSPACES = {"CUBLAS_WORKSPACE_CONFIG": ":4096:2"}
SHOW = """
import torch
def show(what):
    print("measured", what, torch.cuda.memory_allocated(), torch.cuda.memory_reserved())
"""
#: A weight of 16 MiB, an input and an output of 32 MiB each.
WHOLE_STEP = """
model = torch.nn.Linear(2048, 2048, bias=False).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(4096, 2048, device="cuda")
side = torch.cuda.Stream()
side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):
    for _ in range(3):
        optimizer.zero_grad(set_to_none=True)
        model(x).relu().sum().backward()
        optimizer.step()
torch.cuda.current_stream().wait_stream(side)
graph = torch.cuda.CUDAGraph()
optimizer.zero_grad(set_to_none=True)
show("warm")
assert not torch.cuda.is_current_stream_capturing()
with torch.cuda.graph(graph):
    assert torch.cuda.is_current_stream_capturing()
    y = model(x)
    loss = y.relu().sum()
    del y
    loss.backward()
    optimizer.step()
show("captured")
for _ in range(2):
    x.copy_(torch.randn(4096, 2048, device="cuda"))
    graph.replay()
show("replayed")
other = torch.empty(20 * 2**20, dtype=torch.uint8, device="cuda")
show("other")
del other
torch.cuda.empty_cache()
show("emptied")
del graph
torch.cuda.empty_cache()
show("gone")
del loss
optimizer.zero_grad()
torch.cuda.empty_cache()
show("nothing")
"""
#: Weight and input. The warm-up's two workspaces share a segment of 20 MiB, and the capture's two share one in the pool.
GENERAL, WORKSPACE, OF_TWO = (16 + 32) * MIB, 2 * 8 * MIB, 20 * MIB
#: The pool has the workspaces, the output (later its gradient), the relu's result (later the weight's gradient), and the loss.
POOL = OF_TWO + (32 + 32 + 2) * MIB


def _measured(run: Run) -> dict[str, list[tuple[int, int]]]:
    assert run.code == 0, run.errors
    found: dict[str, list[tuple[int, int]]] = {}
    for line in run.errors.splitlines():
        if line.startswith("measured"):
            _, what, *figures = line.split()
            found.setdefault(what, []).append((int(figures[0]), int(figures[1])))
    return found


@pytest.fixture(scope="module")
def whole_step(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("graphs")
    (folder / "script.py").write_text(SHOW + WHOLE_STEP)
    return dry_run("--steps", "5", "--", "script.py", folder=folder, flags=("--json",), environment=WORKSPACES)


def test_a_captured_step_keeps_its_pool_while_the_graph_exists(whole_step: Run):
    seen = {what: figures[0] for what, figures in _measured(whole_step).items()}
    held = GENERAL + 2 * WORKSPACE + 16 * MIB + 512  # the graph owns the weight's gradient and the loss
    reserved = GENERAL + OF_TWO + POOL
    assert seen["captured"] == (held, reserved)
    assert seen["replayed"] == (held, reserved + 32 * MIB)  # and a batch, whose memory the allocator keeps
    assert seen["other"] == (held + 20 * MIB, reserved + 32 * MIB)  # reuses the batch's memory, not the pool's
    assert seen["emptied"] == (held, reserved)


def test_without_the_graph_empty_segments_of_the_pool_are_freed(whole_step: Run):
    seen = {what: figures[0] for what, figures in _measured(whole_step).items()}
    held, reserved = seen["emptied"]
    assert seen["gone"] == (held, reserved - 32 * MIB)  # the output's segment
    assert seen["nothing"] == (held - 16 * MIB - 512, GENERAL + 2 * OF_TWO)  # cuBLAS keeps its workspace in the pool


def test_the_answer_counts_the_memory_that_the_graph_keeps(whole_step: Run):
    """At the capture's highest moment the pool has two of the large tensors and one workspace."""
    answer = whole_step.answer
    highest = GENERAL + WORKSPACE + 8 * MIB + (32 + 32) * MIB + 2 * 512
    with_the_pool = GENERAL + WORKSPACE + POOL + 32 * MIB  # and a batch, when the graph is replayed
    assert answer["kept_by_graphs_bytes"] == with_the_pool - highest
    assert answer["allocator"][0]["reserved_bytes"] == GENERAL + OF_TWO + POOL + 32 * MIB
    assert [one["what"] for one in answer["stood_in"]] == ["CUDA graphs"]
    assert len(answer["steps"]) == 4  # three of the warm-up, and the captured one


def test_a_run_that_stops_before_the_capture_proposes_until_end(tmp_path: Path, whole_step: Run):
    (tmp_path / "script.py").write_text(SHOW + WHOLE_STEP)
    run = dry_run("--", "script.py", folder=tmp_path, flags=("-q",))
    assert "--until-end, so that the run comes to the capture." in " ".join(run.output.split())
    assert not whole_step.answer["before_capture"]


ADAM = """
layer = torch.nn.Linear(2048, 2048, bias=False).cuda()
optimizer = torch.optim.AdamW(layer.parameters(), capturable=CAPTURABLE)
x = torch.randn(4096, 2048, device="cuda")
def step():
    layer(x).sum().backward()
    before = torch.cuda.memory_allocated()
    optimizer.step()
    print("measured", "step", torch.cuda.memory_allocated() - before, 0)
    optimizer.zero_grad()
step()
with torch.cuda.graph(torch.cuda.CUDAGraph()):
    step()
"""


def test_only_a_capturable_adam_is_captured(tmp_path: Path):
    (tmp_path / "script.py").write_text(SHOW + ADAM.replace("CAPTURABLE", "True"))
    run = dry_run("--until-end", "--", "script.py", folder=tmp_path, flags=("--json",))
    assert _measured(run)["step"] == [(2 * 16 * MIB + 512, 0), (0, 0)]  # two states, and the number of steps on the GPU
    (tmp_path / "script.py").write_text(SHOW + ADAM.replace("CAPTURABLE", "False"))
    run = dry_run("--until-end", "--", "script.py", folder=tmp_path)
    assert run.code == 2
    assert "capturable is False" in run.last_line


CALLABLES = """
layer = torch.nn.Linear(2048, 2048, bias=False).cuda()
x = torch.randn(4096, 2048, device="cuda", requires_grad=True)
layer = torch.cuda.make_graphed_callables(layer, (x,))
torch.cuda.empty_cache()
show("captured")
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
for _ in range(3):
    y = layer(x)
    y.sum().backward()
    show("backward")
    optimizer.step()
    optimizer.zero_grad()
    x.grad = None
"""


def test_graphed_callables_keep_outputs_and_gradients_in_one_pool(tmp_path: Path):
    (tmp_path / "script.py").write_text(SHOW + CALLABLES)
    run = dry_run("--snapshot", "run.pickle", "--", "script.py", folder=tmp_path, flags=("--json",), environment=WORKSPACES)
    seen = _measured(run)
    pool = OF_TWO + (32 + 32 + 16) * MIB  # workspaces, output, gradients of input and weight
    of_output = 32 * MIB  # for the output's gradient, allocated outside both captures
    assert seen["captured"] == [
        (GENERAL + 2 * WORKSPACE + of_output + (32 + 32 + 16) * MIB, GENERAL + OF_TWO + of_output + pool)
    ]
    ready = seen["captured"][0]
    assert (
        seen["backward"] == [(ready[0], ready[1] + 2 * MIB)] * 2
    )  # a segment for the loss, which is gone: a replay asks for nothing
    segments = pickle.loads((tmp_path / "run.pickle").read_bytes())["segments"]  # noqa: S301  written by this test
    # cuBLAS's workspaces are left out of a snapshot
    private = sorted(one["total_size"] // MIB for one in segments if one["segment_pool_id"] != (0, 0))
    assert private == [16, 32, 32]


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("torch.cuda.CUDAGraph().capture_begin()", "must be captured on a non-default stream"),
        ("torch.cuda.CUDAGraph().replay()", "replay without a preceding successful capture"),
        ("graph = torch.cuda.CUDAGraph()\nfor _ in range(2):\n    with torch.cuda.graph(graph):\n        pass", "already owns"),
    ],
)
def test_calls_that_torch_refuses_are_refused(tmp_path: Path, code: str, words: str):
    (tmp_path / "script.py").write_text(f"import torch\n{code}\n")
    run = dry_run("--", "script.py", folder=tmp_path)
    assert run.code == 2
    assert words in run.last_line
