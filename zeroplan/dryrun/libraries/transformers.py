"""transformers: it takes other ways with fake tensors, which a GPU would not see."""

from collections.abc import Callable
from types import ModuleType

from zeroplan.dryrun.patches import Patch
from zeroplan.verify.fake_cuda.torch_cuda import always
from zeroplan.verify.replaced import put


def _no_tensor_is_fake(module: ModuleType) -> None:
    """Else a causal mask is built, and attention runs in another kernel (``utils/import_utils.py``, ``is_fake_tensor``, 5.23)."""
    put(module, is_fake_tensor=always(False))
    if hasattr(module, "_package_distribution_mapping"):
        put(module, _package_distribution_mapping=_with_doubles(module._package_distribution_mapping))
    if hasattr(module, "PACKAGE_DISTRIBUTION_MAPPING"):  # in earlier releases, 5.6 among them
        module.PACKAGE_DISTRIBUTION_MAPPING.setdefault("flash_attn", ["flash-attn"])


def _with_doubles(distributions: Callable[[], dict[str, list[str]]]) -> Callable[[], dict[str, list[str]]]:
    """It takes flash-attn for installed where the package comes from a distribution of that name."""
    return lambda: {"flash_attn": ["flash-attn"]} | distributions()


PATCHES: dict[str, Patch] = {"transformers.utils.import_utils": _no_tensor_is_fake}
