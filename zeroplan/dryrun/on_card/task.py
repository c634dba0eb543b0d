"""The message to a process on a real GPU, and its environment. Needs no torch."""

import os
from typing import Literal

from zeroplan.dryrun.task import DryRunTask, launched, without_compiler
from zeroplan.spec.base import CountOrZero, Spec

ORDER = "ZEROPLAN_ON_CARD"
"""The environment variable with the task's file; launchers pass the environment on."""
ANSWER = "rank-{}.json"


class CardTask(Spec):
    """A script to run on real GPUs; with ``looks``, only report which GPU is here.

    ``alone`` runs it as one rank, in a process group that sends nothing; otherwise the launcher assigns the ranks. Each rank
    writes its answer into ``folder``.
    """

    run: DryRunTask
    folder: str
    alone: bool = True
    looks: bool = False


class CardHere(Spec):
    """The first GPU that a process sees, by torch's name, and the number of GPUs. [bytes]"""

    name: str
    total_bytes: CountOrZero
    count: CountOrZero
    kind: Literal["card"] = "card"


def environment(task: CardTask) -> dict[str, str]:
    """The variables for the started process; with ``alone``, torchrun's variables for this rank, on the first GPU.

    >>> run = DryRunTask(target="train.py", gpus=16, gpus_per_node=8, rank=9, gpu="h100-sxm-80gb", answer="a.json")
    >>> variables = environment(CardTask(run=run, folder="."))
    >>> variables["RANK"], variables["LOCAL_RANK"], variables["LOCAL_WORLD_SIZE"], variables["GROUP_RANK"]
    ('9', '0', '8', '1')
    """
    quiet = {"TOKENIZERS_PARALLELISM": "false", "WANDB_MODE": "disabled"}
    if task.run.without_compiler:
        quiet |= without_compiler()
    if not task.alone:
        return quiet
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    return launched(task.run) | ({"LOCAL_RANK": "0"} if task.run.gpus > 1 else {}) | quiet | {"CUDA_VISIBLE_DEVICES": first}
