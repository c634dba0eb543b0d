"""transformers: keeps the code paths of real tensors where it checks for fake ones."""

from types import ModuleType

from zeroplan.dryrun.patches import Patch
from zeroplan.verify.replaced import always, put


def _no_tensor_is_fake(module: ModuleType) -> None:
    """Hide that tensors are fake; otherwise a causal mask is built and another kernel runs (``import_utils.py``, 5.23)."""
    put(module, is_fake_tensor=always(False))


PATCHES: dict[str, Patch] = {"transformers.utils.import_utils": _no_tensor_is_fake}
