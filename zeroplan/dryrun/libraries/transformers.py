"""transformers: it takes other ways with fake tensors, which a GPU would not see."""

from types import ModuleType

from zeroplan.dryrun.patches import Patch
from zeroplan.verify.fake_cuda.torch_cuda import always
from zeroplan.verify.replaced import put


def _no_tensor_is_fake(module: ModuleType) -> None:
    """Else a causal mask is built, and attention runs in another kernel (``utils/import_utils.py``, ``is_fake_tensor``, 5.23)."""
    put(module, is_fake_tensor=always(False))


PATCHES: dict[str, Patch] = {"transformers.utils.import_utils": _no_tensor_is_fake}
