"""Runs a program for an earlier torch: ``with_earlier_torch.py SCRIPT [ARGUMENT ...]``.

It restores the one missing function, for selective checkpointing: until 2024, torch gave its policy the phase as a string.
"""

import runpy
import sys
from pathlib import Path

import torch.utils.checkpoint as checkpointing


def selective(policy):
    def by_phase(context, operator, *args, **kwargs):
        return policy("recompute" if context.is_recompute else "forward", operator, *args, **kwargs)

    return checkpointing.create_selective_checkpoint_contexts(by_phase)


checkpointing._pt2_selective_checkpoint_context_fn_gen = selective
sys.argv = sys.argv[1:]
sys.path.insert(0, str(Path(sys.argv[0]).absolute().parent))
runpy.run_path(sys.argv[0], run_name="__main__")
