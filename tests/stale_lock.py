"""A folder of compiled extensions in which every build waits for ever.

DeepSpeed compiles inference's all-reduce among CPUs when a group is joined, which no training step needs. A build that was killed
leaves its lock (torch.utils.file_baton) in the user's cache, and every later process waits for it. What runs DeepSpeed here
makes no such build, and is given this folder to prove it.
"""

import os
from pathlib import Path


def environment(folder: Path) -> dict[str, str]:
    """This process's environment on one thread, with ``folder`` as the cache of extensions, where a stale lock lies."""
    lock = folder / "deepspeed_shm_comm" / "lock"
    lock.parent.mkdir()
    lock.touch()
    return os.environ | {"OMP_NUM_THREADS": "1", "TORCH_EXTENSIONS_DIR": str(folder)}
