"""A DeepSpeed pipeline of four stages that send hidden states and a mask: ``deepspeed_pipe.py FOLDER``.

Each rank writes the shapes and dtypes of its receive buffers to its own file.
"""

import json
import sys
from pathlib import Path

import deepspeed
import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import nn

WIDTH, WORDS, SEQUENCES, LENGTH = 64, 100, 4, 16


class First(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.words(ids), ids > 3


class Middle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, given: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        hidden, mask = given
        return torch.relu(self.layer(hidden)) * mask.unsqueeze(-1), mask


class Last(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, given: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return self.head(given[0])


def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def batches():
    while True:
        yield tuple(torch.randint(0, WORDS, (SEQUENCES, LENGTH), device="cuda") for _ in range(2))


deepspeed.init_distributed()
model = PipelineModule(
    [LayerSpec(First), *(LayerSpec(Middle) for _ in range(6)), LayerSpec(Last)],
    num_stages=4,
    loss_fn=loss,
    partition_method="uniform",
)
config = {
    "train_micro_batch_size_per_gpu": SEQUENCES, "gradient_accumulation_steps": 4, "steps_per_print": 1000,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-3}}, "zero_optimization": {"stage": 1, "reduce_bucket_size": 1000},
}  # fmt: skip
engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)
data = batches()
for _ in range(4):
    engine.train_batch(data)
    buffers = engine.pipe_recv_buf or ()
    heard = [(list(one.shape), str(one.dtype)) for one in buffers]
    Path(sys.argv[1], f"heard-{engine.global_rank}.json").write_text(json.dumps(heard))
