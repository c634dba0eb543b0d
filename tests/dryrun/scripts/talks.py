"""Two ranks that send each other numbers and objects, and train four stages of different widths: ``talks.py FOLDER``.

It also runs with real tensors over gloo. Each rank writes what it received to its own file.
"""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B

on_gpu = torch.cuda.is_available()
dist.init_process_group("nccl" if on_gpu else "gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
after, before = (rank + 1) % ranks, (rank - 1) % ranks
WIDTHS = (16, 48, 32, 64, 8)


def in_a_batch(numbers: torch.Tensor) -> list[int]:
    """Send numbers to the next rank and receive those of the previous one, in one batch."""
    heard = torch.empty_like(numbers)
    for work in dist.batch_isend_irecv([dist.P2POp(dist.irecv, heard, before), dist.P2POp(dist.isend, numbers, after)]):
        work.wait()
    return (heard * 2).tolist()


def on_the_host(number: int) -> int:
    """Send and receive a number over a gloo group with host tensors, which are real in a dry run, too."""
    heard = torch.zeros(1, dtype=torch.int64)
    work = dist.irecv(heard, before, group=host)
    dist.isend(torch.tensor([number]), after, group=host).wait()
    work.wait()
    return heard.item()


def objects(said: object) -> object:
    """Send an object to the next rank and receive that of the previous one; even ranks send first."""
    heard = [None]
    if rank % 2:
        dist.recv_object_list(heard, src=before)
    dist.send_object_list([said], dst=after)
    if not rank % 2:
        dist.recv_object_list(heard, src=before)
    return heard[0]


class Part(nn.Module):
    """A stage that returns three tensors, one in half precision and one of integers; the next stage takes all three."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTHS[number], WIDTHS[number + 1])
        self.is_last = number == 3

    def forward(self, rows: torch.Tensor, half: torch.Tensor | None = None, whole: torch.Tensor | None = None) -> object:
        out = self.layer(rows)
        if half is not None and whole is not None:
            out = out + half.float().sum() * whole.sum()
        return out if self.is_last else (out, out[:, :4].to(torch.bfloat16), torch.ones_like(out[:, :2], dtype=torch.int64))


host = dist.new_group(backend="gloo")
size = in_a_batch(torch.tensor([rank + 3, 10 * rank], device=device))
told = objects({"from": rank, "rows": torch.ones(rank + 2, 3, device=device)})
seen = {"size": size, "host": on_the_host(rank + 7), "from": told["from"], "rows": list(told["rows"].shape)}

parts = nn.ModuleList(Part(rank + 2 * index) for index in range(2)).to(device)
stages = [PipelineStage(part, rank + 2 * index, 4, device) for index, part in enumerate(parts)]
schedule = ScheduleInterleaved1F1B(stages, n_microbatches=4, loss_fn=nn.functional.mse_loss)
optimizer = torch.optim.AdamW(parts.parameters())
for _ in range(3):
    given = (torch.randn(8, WIDTHS[0], device=device),) if rank == 0 else ()
    schedule.step(*given, target=torch.randn(8, WIDTHS[-1], device=device) if rank else None)
    received = [[*stage.args_recv_info[0], *stage.grad_recv_info[0]] for stage in stages]
    buffers = [[getattr(one, "buffer", None) for one in infos] for infos in received]
    seen["received"] = [[(list(one.shape), str(one.dtype)) for one in some if one is not None] for some in buffers]
    Path(sys.argv[1], f"heard-{rank}.json").write_text(json.dumps(seen))
    optimizer.step()
    optimizer.zero_grad()
