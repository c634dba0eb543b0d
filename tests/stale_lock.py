"""Makes a cache of compiled extensions in which every build waits for ever.

DeepSpeed compiles a CPU all-reduce for inference when it joins a group. A killed build leaves its lock (torch.utils.file_baton) in
the user's cache, and every later process waits for it. Tests run DeepSpeed with this cache to prove that zeroplan avoids the build.
"""

import os
from pathlib import Path


def environment(folder: Path) -> dict[str, str]:
    """This process's environment with one thread, and ``folder`` with a stale lock as the cache of extensions."""
    lock = folder / "deepspeed_shm_comm" / "lock"
    lock.parent.mkdir()
    lock.touch()
    return os.environ | {"OMP_NUM_THREADS": "1", "TORCH_EXTENSIONS_DIR": str(folder)}
