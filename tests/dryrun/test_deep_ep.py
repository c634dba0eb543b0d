"""Zeroplan's replacement of DeepEP, where DeepEP is not installed: what calls return, and the buffers outside the allocator."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.dryrun.running import Run, dry_run
from zeroplan.units import MIB

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(find_spec("deep_ep") is not None, reason="DeepEP is installed, and needs no double"),
]
pytest.importorskip("torch")

#: 1,024 tokens of width 2,048 choose 4 of 32 experts.
BEGIN = """
import torch, torch.distributed as dist
from deep_ep import Buffer, Config, EventOverlap
from deep_ep.utils import EventHandle

TOKENS, WIDTH, EXPERTS, CHOICES = 1024, 2048, 32, 4
dist.init_process_group("nccl")
torch.cuda.set_device(0)
group, on = dist.group.WORLD, {"device": "cuda"}
layer, router = torch.nn.Linear(WIDTH, WIDTH).cuda().bfloat16(), torch.nn.Linear(WIDTH, EXPERTS).cuda()
optimizer = torch.optim.SGD([*layer.parameters(), *router.parameters()], lr=0.1)

def step():
    layer(torch.randn(8, WIDTH, dtype=torch.bfloat16, **on)).sum().backward()
    optimizer.step()

def measured(what, call):
    begin = torch.cuda.memory_allocated()
    found = call()
    print("measured", what, torch.cuda.memory_allocated() - begin)
    return found

def chosen():
    scores = router(torch.randn(TOKENS, WIDTH, **on)).softmax(-1)
    return torch.topk(scores.detach(), CHOICES, dim=-1)
"""
TRAINING = """
Buffer.set_num_sms(24)
hints = Buffer.get_dispatch_config(group.size()), Buffer.get_combine_config(group.size())
nvl = max(one.get_nvl_buffer_size_hint(WIDTH * 2, group.size()) for one in hints)
rdma = max(one.get_rdma_buffer_size_hint(WIDTH * 2, group.size()) for one in hints)
buffer = Buffer(group, nvl, rdma)
print("sizes", nvl, rdma)
weights, experts = chosen()
x = torch.randn(TOKENS, WIDTH, dtype=torch.bfloat16, **on)
per_rank, per_node, per_expert, in_rank, event = measured("layout", lambda: buffer.get_dispatch_layout(experts, EXPERTS))
print("sent", per_rank.tolist(), per_expert.tolist(), None if per_node is None else per_node.tolist())
sent = {"num_tokens_per_rank": per_rank, "num_tokens_per_rdma_rank": per_node, "is_token_in_rank": in_rank}
sent["num_tokens_per_expert"] = per_expert
arrived, chosen_here, weights_here, counts, handle, event = measured(
    "dispatch", lambda: buffer.dispatch(
        x, topk_idx=experts, topk_weights=weights, previous_event=buffer.capture(), async_finish=True,
        allocate_on_comm_stream=True, **sent))
event.current_stream_wait()
print("arrived", tuple(arrived.shape), tuple(chosen_here.shape), weights_here.dtype, counts, int((chosen_here >= 0).sum()))
back, back_weights, event = measured("combine", lambda: buffer.combine(arrived, handle, topk_weights=weights_here))
print("back", tuple(back.shape), tuple(back_weights.shape))
again, *nothing, event = measured("again", lambda: buffer.dispatch(back, handle=handle))
print("again", tuple(again.shape), nothing)
eight = x.to(torch.float8_e4m3fn), torch.ones(TOKENS, WIDTH // 128, **on)
(low, scales), *_ = buffer.dispatch(eight, topk_idx=experts, topk_weights=weights, **sent)
print("eight", low.dtype, tuple(scales.shape))
step(); step(); step()
"""
X, INDEX, WEIGHT, SOURCE = 2 * 2048, 8 * 4, 4 * 4, 4
"""For one token: its hidden state, its experts, their weights, and its source. [bytes]"""


def _printed(run: Run) -> dict[str, list[str]]:
    assert run.code == 0, run.errors
    found: dict[str, list[str]] = {}
    for line in run.errors.splitlines():
        what, _, rest = line.partition(" ")
        if what == "measured":
            what, _, rest = rest.partition(" ")
            what = f"{what} bytes"
        found.setdefault(what, []).append(rest)
    return found


def _run(folder: Path, gpus: int, *flags: str, script: str = TRAINING) -> Run:
    (folder / "script.py").write_text(BEGIN + script)
    return dry_run("--gpus", str(gpus), *flags, "--", "script.py", folder=folder, flags=("--json",))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return _run(tmp_path_factory.mktemp("deep_ep"), 8)


def test_tokens_are_spread_evenly_over_experts_and_ranks(run: Run):
    """Each of 8 ranks receives 512 tokens from this rank, and each of 32 experts 128; as many arrive from each rank."""
    said = _printed(run)
    assert said["sent"] == [f"{[512] * 8} {[128] * 32} None"]
    assert said["arrived"] == [f"(4096, 2048) (4096, 4) torch.float32 {[1024] * 4} 4096"]
    assert said["back"] == ["(1024, 2048) (1024, 4)"]
    assert said["again"] == ["(4096, 2048) [None, None, None, None]"]
    assert said["eight"] == ["torch.float8_e4m3fn (4096, 16)"]


def test_calls_allocate_their_results_and_what_combine_needs(run: Run):
    said = _printed(run)
    assert said["layout bytes"] == [str(512 + 512 + 1024 * 8)]
    notes = 4096 * SOURCE + 1024 * 8 * 4 + 3 * 512  # where tokens come from and go to; three small tables
    assert said["dispatch bytes"] == [str(4096 * (X + INDEX + WEIGHT) + notes)]
    assert said["combine bytes"] == [str(1024 * (X + WEIGHT))]
    assert said["again bytes"] == [str(4096 * X)]


def test_buffers_are_counted_outside_the_allocator(run: Run):
    """12 channels to 8 ranks with 256 tokens each: 4,096 bytes of hidden state; 2,056 of experts, weights, scales and source."""
    nvl = 12 * 8 * (5 * 4 + 256 * (4096 + 8 + 128 * (8 + 4 + 4)))
    said, answer = _printed(run), run.answer
    assert said["sizes"] == [f"{-(-nvl // 128) * 128} 0"]
    buffers = {one["what"]: one["expected_bytes"] for one in answer["outside_buffers"]}
    assert buffers == {"DeepEP's workspace": 32 * MIB, "DeepEP's buffer for NVLink": -(-nvl // (2 * MIB)) * 2 * MIB}
    assert "DeepEP" in {one["what"] for one in answer["stood_in"]}
    assert answer["imbalance"] == 1


def test_the_imbalance_multiplies_the_tokens_that_arrive(tmp_path: Path):
    run = _run(tmp_path, 8, "--imbalance", "1.5")
    assert _printed(run)["arrived"] == [f"(6144, 2048) (6144, 4) torch.float32 {[1536] * 4} 6144"]
    assert run.answer["imbalance"] == 1.5


def test_between_nodes_there_is_a_buffer_for_rdma(tmp_path: Path):
    """Two nodes: 12 channels per node with 128 tokens, rounded up to whole sends of 20 or 12, in both directions."""
    run = _run(tmp_path, 16)
    rdma = max(2 * 12 * 2 * (18 * 4 + tokens * (4096 + 8 + 128 * 16 + 16)) for tokens in (140, 132))
    said = _printed(run)
    assert said["sizes"][0].split()[1] == str(-(-rdma // 128) * 128)
    assert said["sent"] == [f"{[256] * 16} {[128] * 32} {[1024] * 2}"]
    assert said["arrived"] == [f"(4096, 2048) (4096, 4) torch.float32 {[2048] * 2} 4096"]
    # where tokens come from, go to, and are forwarded to; tables of 2 x 12, 2 x 12, 2 and 16 numbers, and two of 16 x 12
    notes = 4096 * 8 + 1024 * 2 * 4 + 2 * 1024 * 8 * 4 + 4 * 512 + 2 * 1024
    assert said["dispatch bytes"] == [str(4096 * (X + INDEX + WEIGHT) + notes)]
    (buffer,) = [one for one in run.answer["outside_buffers"] if "RDMA" in one["what"]]
    assert buffer["low_bytes"] == -(-rdma // 128) * 128
    assert buffer["expected_bytes"] == -(-rdma // (512 * MIB)) * 512 * MIB


KNOWN = """
buffer = Buffer(group, 2**28)
experts = (torch.arange(TOKENS * CHOICES, **on) % EXPERTS).view(TOKENS, CHOICES)
experts[:, 3] = -1

class Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weights):
        per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(experts, EXPERTS)
        arrived, chosen, its_weights, counts, ctx.handle, _ = buffer.dispatch(
            x, topk_idx=experts, topk_weights=weights, num_tokens_per_rank=per_rank, is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert, expert_alignment=100)
        print("arrived", tuple(arrived.shape), counts, chosen[0].tolist())
        return arrived, its_weights

    @staticmethod
    def backward(ctx, gradient, of_weights):
        return buffer.combine(gradient.contiguous(), ctx.handle, topk_weights=of_weights)[:2]

for _ in range(3):
    x = torch.randn(TOKENS, WIDTH, dtype=torch.bfloat16, **on)
    weights = router(x.float()).softmax(-1)[:, :CHOICES].contiguous()
    arrived, its_weights = Exchange.apply(layer(x), weights)
    ((arrived * its_weights.sum(1, keepdim=True).bfloat16()).sum()).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_choices_of_experts_with_known_values_are_used(tmp_path: Path):
    """All experts of a token are on one rank, so that each rank sends 128 of its 1,024 tokens there.

    ``--imbalance`` applies only to assumed choices.
    """
    run = _run(tmp_path, 8, "--imbalance", "1.5", script=KNOWN)
    assert _printed(run)["arrived"] == ["(1024, 2048) [1100, 1100, 1100, 0] [0, 1, 2, -1]"] * 2
    assert run.answer["ended"] == "steps taken"
    assert run.answer["imbalance"] is None


LOW_LATENCY = """
hint = Buffer.get_low_latency_rdma_size_hint(128, WIDTH, group.size(), EXPERTS)
print("hint", hint)
buffer = Buffer(group, 0, hint, low_latency_mode=True, num_qps_per_rank=EXPERTS // group.size(), explicitly_destroy=True)
weights, experts = chosen()
x, weights, experts = torch.randn(100, WIDTH, dtype=torch.bfloat16, **on), weights[:100], experts[:100].contiguous()
(arrived, scales), counts, handle, event, hook = measured(
    "dispatch", lambda: buffer.low_latency_dispatch(x, experts, 128, EXPERTS, return_recv_hook=True))
hook()
print("arrived", arrived.dtype, tuple(arrived.shape), tuple(scales.shape), scales.stride(), counts.tolist())
back, event, hook = measured("combine", lambda: buffer.low_latency_combine(arrived.bfloat16(), experts, weights, handle))
print("back", tuple(back.shape), hook)
buffer.destroy()
other = Buffer(group, 2**20, explicitly_destroy=True)
step(); step(); step()
"""


def test_low_latency_calls_have_room_for_the_most_tokens_possible(tmp_path: Path):
    run = _run(tmp_path, 8, script=LOW_LATENCY)
    said = _printed(run)
    each = max(16 + max(2 * 2048, 2048 + 16 * 4), 16 * 4 + 2 * 2048)
    needs = 2 * (32 * 128 * (16 * 4 + 2 * 2048) + 32 * 128 * each + 128)
    assert said["hint"] == [str((needs + 128) // 128 * 128)]
    assert said["arrived"] == [f"torch.float8_e4m3fn (4, 1024, 2048) (4, 1024, 16) (16384, 1, 1024) {[104, 104, 96, 96]}"]
    assert said["dispatch bytes"] == [str(4 * 1024 * (2048 + 4 + 4 * 16) + 2 * 512)]
    assert said["combine bytes"] == [str(100 * 2 * 2048)]
    assert said["back"] == ["(100, 2048) None"]
    # the first buffer was freed before the second was made: only the larger one counts
    assert [one["what"] for one in run.answer["outside_buffers"]] == ["DeepEP's workspace", "DeepEP's buffer for RDMA"]


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("from deep_ep import ElasticBuffer", "deep_ep.ElasticBuffer is not supported in a dry run; use Buffer"),
        (
            "Buffer(group, 2**20).get_local_buffer_tensor(torch.int32)",
            "deep_ep.Buffer.get_local_buffer_tensor is not supported in a dry run",
        ),
        ("Buffer(group, 1000)", "must be multiples of 128 bytes"),
        ("Buffer(group, 0, 2**20)", "between nodes or in low-latency mode"),
        ("Buffer.get_dispatch_config(7)", "Unsupported number of EP ranks: 7"),
    ],
)
def test_unsupported_and_wrong_calls_end_in_one_line(tmp_path: Path, code: str, words: str):
    run = _run(tmp_path, 8, script=code)
    assert run.code == 2
    assert words in run.last_line
