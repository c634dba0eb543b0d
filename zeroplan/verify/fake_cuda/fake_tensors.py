"""Runs engines and models on fake tensors, with the replacements that they need to treat those like real ones."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import torch
from torch import _meta_registrations
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.tensor import _sharding_prop

from zeroplan.verify.fake_cuda.attention import decisions
from zeroplan.verify.fake_cuda.installed import CUDA
from zeroplan.verify.fake_parts.fake_mode import QuickFakes
from zeroplan.verify.fake_parts.optimizer_kernels import optimizer_kernels
from zeroplan.verify.fake_parts.reducer import real_reducer_integers
from zeroplan.verify.replaced import replaced
from zeroplan.verify.watching.watcher import Watcher


@contextmanager
def fake_tensors(watcher: Watcher, device: str = "cpu", *, strided: bool = False) -> Iterator[None]:
    """Make all tensors made inside fake: shapes, dtypes and storages with a size, but no bytes.

    ``strided``: a dimension may be sharded over two dimensions of the mesh.
    """
    as_on_cuda = (decisions(),) if device == CUDA else ()
    mode = _FakesOnTheGpu() if device == CUDA else QuickFakes()
    plain = () if strided else (_no_strided_shards(),)
    with ExitStack() as patches:
        for patch in (_one_sequence_per_row(), *plain, *fake_tensor_patches(watcher), *as_on_cuda, mode):
            patches.enter_context(patch)
        yield


def fake_tensor_patches(watcher: Watcher) -> tuple[AbstractContextManager[None], ...]:
    """The replacements that let torch and the engines run on fake tensors as on real ones, each a context manager."""
    return (_lazy_chunks(), _grouped_mm_shapes(), _skip_trunc_normal(), optimizer_kernels(), real_reducer_integers(watcher))


class _FakesOnTheGpu(QuickFakes):  # type: ignore[no-untyped-call]  # torch leaves its modes untyped
    """Fake tensors on a fake GPU: constants stay on the host until they are moved."""

    @property
    def avoid_device_init(self) -> bool:
        """True: the device cannot be touched."""
        return True


def _one_sequence_per_row() -> AbstractContextManager[None]:
    """Tell transformers that each row of a batch is one sequence, which it cannot read from fake position ids.

    Otherwise it would build a mask for packed sequences, which no real run has.
    """
    from transformers import masking_utils  # noqa: PLC0415  takes seconds, and only a run needs it

    original = masking_utils.find_packed_sequence_indices

    def one_sequence_per_row(position_ids: torch.Tensor) -> None:
        indices = original(position_ids)
        if indices is not None:
            (indices[:, -1] == 0).all()

    return replaced(masking_utils, "find_packed_sequence_indices", one_sequence_per_row)


class _Chunks:
    """The result of ``torch.chunk``, with empty chunks for missing ones, each made on access."""

    def __init__(self, tensor: torch.Tensor, count: int, dim: int) -> None:
        self._tensor, self._dim, self._width = tensor, dim, -(-tensor.size(dim) // count)

    def __getitem__(self, index: int) -> torch.Tensor:
        start = index * self._width
        width = min(self._width, self._tensor.size(self._dim) - start)
        return self._tensor.narrow(self._dim, start, width) if width > 0 else self._tensor.new_empty(0)


def _lazy_chunks() -> AbstractContextManager[None]:
    """Make FSDP2's chunks on access: it uses only this rank's shard, and a thousand fake views are slow."""
    return replaced(_fsdp_param, "_chunk_with_empty", _Chunks)


def _no_strided_shards() -> AbstractContextManager[None]:
    """Skip DTensor's slow search for dimensions that are sharded twice."""
    name = "_propagate_use_strided_shard_flag"  # since torch 2.13
    return replaced(_sharding_prop, name, lambda *_: None) if hasattr(_sharding_prop, name) else nullcontext()


def _grouped_mm_shapes() -> AbstractContextManager[None]:
    """Let fake experts compute in fp32 and fp16, which torch 2.13's kernels support but its shape function refuses."""
    original: Callable[..., object] = _meta_registrations._meta_grouped_mm_common
    shaped: Callable[..., object] = _meta_registrations._create_grouped_mm_output_tensor

    def product(mat_a: torch.Tensor, mat_b: torch.Tensor, **others: object) -> object:
        if mat_a.dtype == mat_b.dtype in (torch.float32, torch.float16):
            return shaped(mat_a, mat_b, others["offs"], others["out_dtype"])
        return original(mat_a, mat_b, **others)

    return replaced(_meta_registrations, "_meta_grouped_mm_common", product)


def _skip_trunc_normal() -> AbstractContextManager[None]:
    """Skip the sampling of ``trunc_normal_``, as torch does for meta tensors: since 2.13 it reads values to resample."""
    return replaced(torch.nn.init, "_no_grad_trunc_normal_", lambda tensor, *_, **__: tensor)
