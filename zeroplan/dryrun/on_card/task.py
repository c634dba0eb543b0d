"""What a process on a card is told, and its environment. Needs no torch."""

import os
from dataclasses import dataclass
from typing import Literal

from zeroplan.dryrun.task import DryRunTask, launched, without_compiler
from zeroplan.spec.base import CountOrZero, Spec

ORDER = "ZEROPLAN_ON_CARD"
"""The variable of the environment that names the file with the task: a launcher passes the environment on."""
ANSWER = "rank-{}.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class CardTask(Spec):
    """A script to run on real GPUs, or with ``looks`` alone the question what GPU is here.

    ``alone`` runs it as one rank, in a process group that sends nothing; else the launcher says which rank each process is. Each
    rank writes its answer into ``folder``.
    """

    run: DryRunTask
    folder: str
    alone: bool = True
    looks: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CardHere(Spec):
    """The GPU that a process sees first, as torch names it, and how many there are. [bytes]"""

    name: str
    total_bytes: CountOrZero
    count: CountOrZero
    kind: Literal["card"] = "card"


def environment(task: CardTask) -> dict[str, str]:
    """What is set for the process that is started: alone, what torchrun sets for this rank; it has one GPU, so it is the first.

    >>> run = DryRunTask(target="train.py", gpus=16, gpus_per_node=8, rank=9, gpu="h100-sxm-80gb", answer="a.json")
    >>> said = environment(CardTask(run=run, folder="."))
    >>> said["RANK"], said["LOCAL_RANK"], said["LOCAL_WORLD_SIZE"], said["GROUP_RANK"]
    ('9', '0', '8', '1')
    """
    quiet = {"TOKENIZERS_PARALLELISM": "false", "WANDB_MODE": "disabled"}
    if task.run.without_compiler:
        quiet |= without_compiler()
    if not task.alone:
        return quiet
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    return launched(task.run) | ({"LOCAL_RANK": "0"} if task.run.gpus > 1 else {}) | quiet | {"CUDA_VISIBLE_DEVICES": first}
