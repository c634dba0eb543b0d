"""The message to the process that runs a script, and the process's environment. Needs no torch."""

from pathlib import Path
from typing import Annotated, Literal

from zeroplan.spec.base import Count, CountOrZero, Range, Spec


class DryRunTask(Spec):
    """One script, run as one rank.

    ``target`` is a path, or with ``module`` a module's name; ``arguments`` are the script's. ``gpu`` is a name in the
    catalogue. ``answer`` is the file for the result, with every block of memory if ``traced``, and with a profile of the
    script's model if ``profiled``. ``messages`` is the folder for messages between ranks; a ``companion`` only sends messages and
    has no answer. ``eager`` skips ``torch.compile``. With ``until_end`` the script runs to its end, or for that many seconds.
    The rank's experts receive ``imbalance`` times the even share of tokens. ``launcher`` has the command's words before the
    script.
    """

    target: str
    module: bool = False
    arguments: tuple[str, ...] = ()
    gpus: Count
    gpus_per_node: Count
    rank: CountOrZero = 0
    steps: Count = 2
    gpu: str
    answer: str
    messages: str = ""
    companion: bool = False
    traced: bool = False
    profiled: Literal["own", "all"] | None = None
    eager: bool = False
    until_end: CountOrZero = 0
    imbalance: Annotated[float, Range(1, 1e6)] = 1.0
    launcher: tuple[str, ...] = ()

    @property
    def without_compiler(self) -> str:
        """The flag that turns ``torch.compile`` off; empty if it is on. A profile needs the uncompiled model."""
        return "--eager" if self.eager else "--profile" if self.profiled else ""

    @property
    def local_rank(self) -> int:
        """The rank within its node."""
        return self.rank % self.gpus_per_node

    @property
    def local_world_size(self) -> int:
        """The number of ranks on the node."""
        return min(self.gpus, self.gpus_per_node)


class Over(Spec):
    """A companion rank writes this instead of an answer when it ends."""


class Failed(Spec):
    """A script without an answer: the cause and a one-line message."""

    cause: Literal["script", "here"]
    text: str


def environment(task: DryRunTask) -> dict[str, str]:
    """The variables of a rank under torchrun, and variables that stop libraries from compiling, downloading and reporting.

    >>> task = DryRunTask(target="train.py", gpus=16, gpus_per_node=8, rank=9, gpu="h100-sxm-80gb", answer="a.json")
    >>> environment(task)["LOCAL_RANK"], environment(task)["GROUP_RANK"]
    ('1', '1')
    """
    return launched(task) | _QUIET | (without_compiler() if task.without_compiler else _compiled(task))


def launched(task: DryRunTask) -> dict[str, str]:
    """The variables that torchrun sets for a rank; empty for one rank alone."""
    ranks = {
        "RANK": task.rank, "WORLD_SIZE": task.gpus, "LOCAL_RANK": task.local_rank, "LOCAL_WORLD_SIZE": task.local_world_size,
        "GROUP_RANK": task.rank // task.gpus_per_node, "GROUP_WORLD_SIZE": -(-task.gpus // task.gpus_per_node),
        "ROLE_RANK": task.rank, "ROLE_WORLD_SIZE": task.gpus,
    }  # fmt: skip
    return _TORCHRUN | {name: str(number) for name, number in ranks.items()} if task.gpus > 1 else {}


def without_compiler() -> dict[str, str]:
    """The variables that switch torch's compiler off."""
    return {"TORCH_COMPILE_DISABLE": "1", "TORCHDYNAMO_DISABLE": "1"}


def _compiled(task: DryRunTask) -> dict[str, str]:
    """The variables that make inductor write beside the answer, ignore its caches, and start no processes."""
    return {
        "TORCHINDUCTOR_CACHE_DIR": str(Path(task.answer).parent / "inductor"), "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }  # fmt: skip


_TORCHRUN = {
    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_MAX_RESTARTS": "0", "ROLE_NAME": "default",
}  # fmt: skip
_QUIET = {
    "DS_ACCELERATOR": "cuda", "TOKENIZERS_PARALLELISM": "false",
    "CUDA_VISIBLE_DEVICES": "", "CUDA_HOME": "/nonexistent", "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1",
    "WANDB_MODE": "disabled",
}  # fmt: skip
