"""The process of `--backend cuda` on a fake GPU, for machines without a real one.

The model of CUDA's allocator counts the memory, as in a dry run. The environment variable ``FAKE_CARD`` makes the two differ:
``more`` allocates a further 16 MiB, ``full`` runs out of memory in the second step.
"""

from __future__ import annotations

import gc
import os

os.environ["CUDA_VISIBLE_DEVICES"] = ""

from contextlib import ExitStack
from pathlib import Path

import torch

from zeroplan.catalog.gpu import gpu
from zeroplan.dryrun import process_group, torch_patches
from zeroplan.dryrun.libraries import transformers
from zeroplan.dryrun.on_card import child, phases
from zeroplan.dryrun.on_card.phases import PhasesOnCard
from zeroplan.dryrun.patches import AfterImport
from zeroplan.dryrun.rank_messages import RankMessages
from zeroplan.dryrun.watcher import ScriptTracker
from zeroplan.engines.device import workspace
from zeroplan.ledger import Phase
from zeroplan.verify.fake_cuda.attention import decisions
from zeroplan.verify.fake_cuda.fake_tensors import fake_tensor_patches
from zeroplan.verify.fake_cuda.half_fake import HalfFakes
from zeroplan.verify.fake_cuda.installed import install
from zeroplan.verify.fake_cuda.memory import Memory
from zeroplan.verify.fake_cuda.stand_ins import StandIns


class OnFakeCard(child._Run):
    """Runs the script on fake tensors."""

    def __init__(self, task: child.CardTask) -> None:
        stand_ins = StandIns()
        self.tracker, self._fakes = (
            ScriptTracker(MEMORY, expandable_segments=False, workspace_bytes=workspace(KIND)[0]),
            HalfFakes(stand_ins),
        )
        super().__init__(task)
        if not task.alone:
            process_group.make_groups_fake(RankMessages(Path(task.folder), task.run.rank))
        torch_patches.change_torch(stand_ins)
        AfterImport({name: transformers.PATCHES[name] for name in ("transformers.utils.import_utils",)}).install()
        torch_patches.skip_compilation("no card is here")

    def __call__(self) -> object:
        with ExitStack() as stack:
            for one in (*fake_tensor_patches(self.tracker), decisions(), self._fakes, self.tracker):
                stack.enter_context(one)
            if os.environ.get("FAKE_CARD") == "more":
                self.more = torch.empty(2**22, device="cuda")
            return super().__call__()


class PhasesOnFakeCard(PhasesOnCard):
    """Runs the garbage collector at the beginning of each phase, as a dry run does."""

    def enter(self, phase: Phase, step: int, *, collect: bool = True) -> None:
        gc.collect()
        super().enter(phase, step, collect=collect)
        if (step, phase) == (1, Phase.BACKWARD) and os.environ.get("FAKE_CARD") == "full":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


if __name__ == "__main__":
    KIND = gpu("h200-sxm-141gb")
    MEMORY = Memory(int(KIND.memory_bytes.value))
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    install(KIND, MEMORY, ranks=ranks, local_rank=int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.get_device_properties(0).name = "NVIDIA H200"  # as torch names it
    child._Run, phases.PhasesOnCard = OnFakeCard, PhasesOnFakeCard
    child.main()
