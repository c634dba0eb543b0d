"""Replaces torch functions that fail on tensors without bytes: moving modules, addresses, loaders, threads, saving."""

import concurrent.futures
import sys
import types
from collections.abc import Callable
from functools import cache
from inspect import signature
from typing import Any

import torch
from torch import nn
from torch._dynamo.comptime import comptime
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.autograd import profiler
from torch.nn.attention import flex_attention as flex
from torch.optim import optimizer
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader

from zeroplan.dryrun.replacements import note, noting
from zeroplan.dryrun.synced_norms import give_synced_norms_shapes
from zeroplan.verify.fake_cuda.graphs import Graph
from zeroplan.verify.fake_cuda.known_values import how_sure, keep, known
from zeroplan.verify.fake_cuda.stand_ins import StandIns
from zeroplan.verify.replaced import always, put


def change_torch(stand_ins: StandIns) -> None:
    """Install all replacements except ``torch.compile``'s."""
    _let_tensors_move()
    _give_addresses()
    _let_kinds_be_fake()
    _let_parameters_be_made_again()
    # By default optimizers use lists if they know the class of every parameter (torch 2.13, ``_default_to_fused_or_foreach``).
    optimizer._foreach_supported_types.append(FakeTensor)
    _let_values_be_read(stand_ins)
    _load_in_this_process()
    _leave_out_randomness()
    put(torch, save=noting("torch.save", "nothing is written", always(None)))
    put(torch.amp.GradScaler, _maybe_opt_step=noting("the gradient scaler's overflow check", "every step runs", _always_step))
    captured = "captured code runs once, in a pool of memory of its own, and replaying does nothing"
    put(Graph, capture_begin=noting("CUDA graphs", captured, Graph.capture_begin))
    _let_the_host_be_profiled()
    give_synced_norms_shapes()
    put(torch.Tensor, is_pinned=always(False), pin_memory=lambda tensor, *_: tensor)
    put(flex, flex_attention=_flex_attention)


def _let_tensors_move() -> None:
    """Make ``parameter.data = other`` and ``module.to`` also copy a fake tensor's device, which is a Python attribute."""
    data: Any = torch._C.TensorBase.data

    def put_data(mine: FakeTensor, other: torch.Tensor) -> None:
        with torch.no_grad():
            data.__set__(mine, other)
        if isinstance(other, FakeTensor):
            mine.fake_device = other.fake_device
        keep(mine, known(other))

    FakeTensor.data = property(data.__get__, put_data)  # type: ignore[assignment]  # a tensor's data is a property of C's
    swap: Callable[..., None] = torch.utils.swap_tensors

    def put_data_of_host(mine: torch.Tensor, other: torch.Tensor) -> None:
        """Make a real host tensor fake if it gets a fake tensor's data; keep its attributes."""
        if not isinstance(other, FakeTensor) or type(mine) not in (torch.Tensor, nn.Parameter):
            data.__set__(mine, other)
            return
        beside, wants = dict(vars(mine)), mine.requires_grad
        with torch.no_grad():
            made = nn.Parameter(other, wants) if isinstance(mine, nn.Parameter) else other.detach().requires_grad_(wants)
        for name in ("__class__", "__dict__"):
            setattr(mine, name, getattr(made, name))
        torch._C._swap_tensor_impl(mine, made)  # swap_tensors refuses tensors that have a fake copy
        vars(mine).update(beside)

    torch.Tensor.data = property(data.__get__, put_data_of_host)  # type: ignore[assignment]

    def swap_tensors(mine: torch.Tensor, other: torch.Tensor) -> None:
        """Keep the parameter objects when a module moves, as torch does for real tensors."""
        both = isinstance(mine, FakeTensor) and isinstance(other, FakeTensor)
        if both and torch._has_compatible_shallow_copy_type(mine, other):
            put_data(mine, other)  # type: ignore[arg-type]
            vars(mine).update(_beside(other))
            return
        swap(mine, other)

    put(torch.utils, swap_tensors=swap_tensors)


def _give_addresses() -> None:
    """Return the storage object's address from ``data_ptr``, since libraries tell tensors apart by address."""
    address: Callable[..., int] = torch.Tensor.data_ptr
    storage_address: Callable[..., int] = torch.UntypedStorage.data_ptr

    def data_ptr(tensor: torch.Tensor) -> int:
        if isinstance(tensor, FakeTensor):
            return int(tensor.untyped_storage()._cdata + tensor.storage_offset() * tensor.element_size())
        return address(tensor)

    def of_storage(storage: torch.UntypedStorage) -> int:
        return storage._cdata if storage.device.type == "meta" else storage_address(storage)

    put(torch.Tensor, data_ptr=data_ptr)
    put(torch.UntypedStorage, data_ptr=of_storage)


def _let_kinds_be_fake() -> None:
    """Let a library make its own parameter class from a fake tensor: the object gets a class that is both."""
    make: Callable[..., torch.Tensor] = torch.Tensor._make_subclass

    def make_subclass(kind: type[torch.Tensor], data: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:  # noqa: ANN401
        if not isinstance(data, FakeTensor):
            return make(kind, data, *args, **kwargs)
        made = data.detach()
        made.__class__ = _fake_kind(kind)
        return made.requires_grad_(bool(args[0] if args else kwargs.get("require_grad", False)))

    put(torch.Tensor, _make_subclass=staticmethod(make_subclass))


def _let_parameters_be_made_again() -> None:
    """Let ``type(parameter)(data, requires_grad=...)`` make a parameter from a fake tensor.

    accelerate does so to move or load it (1.15, ``init_on_device`` and ``set_module_tensor_to_device``). A fake parameter's
    type is FakeTensor, whose constructor has other arguments.
    """
    make: Callable[..., FakeTensor] = FakeTensor.__new__

    def new(kind: type[FakeTensor], *args: Any, **kwargs: Any) -> torch.Tensor:  # noqa: ANN401
        if "requires_grad" in kwargs and args and isinstance(args[0], FakeTensor):
            return nn.Parameter(args[0].detach(), kwargs["requires_grad"])
        return make(kind, *args, **kwargs)

    put(FakeTensor, __new__=staticmethod(new))


@cache
def _fake_kind(kind: type[torch.Tensor]) -> type[torch.Tensor]:
    """A subclass of FakeTensor and the library's class, with the latter's name, by which libraries recognise it."""

    def new(_: type, *args: object, **kwargs: object) -> torch.Tensor:
        return kind.__new__(kind, *args, **kwargs)

    def detach(tensor: torch.Tensor) -> torch.Tensor:
        made = plain(tensor)
        made.__class__ = made_kind
        vars(made).update(_beside(tensor))
        return made

    plain = torch.Tensor.detach
    given = {"__new__": staticmethod(new), "__init__": kind.__init__, "__module__": kind.__module__, "detach": detach}
    made_kind = types.new_class(kind.__name__, (FakeTensor, kind), exec_body=lambda names: names.update(given))
    return made_kind


def _beside(tensor: torch.Tensor) -> dict[str, object]:
    """The attributes that a library's tensor class adds, such as scales.

    accelerate writes ``requires_grad`` there too, which is no such attribute (``init_on_device``, 1.15).
    """
    if type(tensor) is FakeTensor:
        return {}
    fakes_own = vars(torch.Tensor.detach(tensor)).keys() | {"requires_grad"}
    return {name: value for name, value in vars(tensor).items() if name not in fakes_own}


def _let_values_be_read(stand_ins: StandIns) -> None:
    """Make ``tolist`` and ``numpy`` return known values, else ones."""
    to_list, one_by_one, numpy = torch.Tensor.tolist, FakeTensor.tolist, torch.Tensor.numpy

    def real(tensor: torch.Tensor) -> torch.Tensor:
        values = known(tensor)
        if values is not None:
            stand_ins.note_choice(how_sure(tensor), sized=True)
            return values
        stand_ins.note("values", "ones")
        with unset_fake_temporarily():
            return torch.ones(tensor.shape, dtype=tensor.dtype)

    def read_first(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """Read tensors in a list before ``torch.tensor`` does, since its C++ reads them without any mode."""

        def made(data: object, *args: object, **kwargs: object) -> torch.Tensor:
            first = data
            while isinstance(first, list | tuple) and first:
                first = first[0]
            if isinstance(first, torch.Tensor) and first is not data:
                data = tree_map_only(torch.Tensor, lambda one: one.tolist() if one.dim() else one.item(), data)
            return make(data, *args, **kwargs)

        return made

    put(torch, tensor=read_first(torch.tensor), as_tensor=read_first(torch.as_tensor))
    put(torch.Tensor, tolist=lambda tensor: to_list(real(tensor)), numpy=lambda tensor, *a, **k: numpy(real(tensor), *a, **k))
    put(FakeTensor, tolist=lambda tensor: one_by_one(tensor) if known(tensor) is None else to_list(real(tensor)))


def _load_in_this_process() -> None:
    """Run data loaders and thread pools in this thread, since modes belong to a thread."""
    made = DataLoader.__init__

    def loader(self: DataLoader[object], *args: object, **kwargs: object) -> None:
        if kwargs.get("num_workers") or args[5:6] > (0,):
            note("data-loading processes", "batches are loaded in the script's own process")
        kwargs |= {"num_workers": 0, "pin_memory": False, "prefetch_factor": None, "persistent_workers": False}
        kwargs.pop("multiprocessing_context", None)
        made(self, *args[:5], **kwargs)  # type: ignore[arg-type]  # dataset, batch_size, shuffle, sampler, batch_sampler

    def submit(_: object, job: Callable[..., object], /, *args: object, **kwargs: object) -> concurrent.futures.Future[object]:
        note("pools of threads", "each job runs at once in the thread that submits it")
        future: concurrent.futures.Future[object] = concurrent.futures.Future()
        try:
            future.set_result(job(*args, **kwargs))
        except Exception as error:  # noqa: BLE001  the future carries every error
            future.set_exception(error)
        return future

    put(DataLoader, __init__=loader)
    put(concurrent.futures.ThreadPoolExecutor, submit=submit)


def _leave_out_randomness() -> None:
    """Skip generator states without values, and turn off DTensor's random generator."""
    import torch.distributed.tensor  # noqa: PLC0415  its modules hold the function by name

    for name, module in list(sys.modules.items()):  # watchers do not see higher-order operators
        if name.startswith("torch.distributed.tensor"):
            put(module, is_rng_supported_mesh=always(False))
    set_state = torch.set_rng_state

    def set_rng_state(state: torch.Tensor) -> None:
        values = known(state)
        if values is not None:
            set_state(values)

    for owner in (torch, torch.random):
        put(owner, set_rng_state=set_rng_state)


COMPILER = "torch.compile"
"""The name of the compiler in the list of replacements."""


def skip_compilation(why: str) -> None:
    """Turn ``torch.compile`` off: the code runs uncompiled, which needs more memory."""
    left_out = (COMPILER, f"left out, the code runs uncompiled ({why})")

    def compiled(model: Any = None, *_: object, **__: object) -> object:  # noqa: ANN401
        if model is None:
            return compiled
        if isinstance(model, types.FunctionType):
            return noting(*left_out, model)  # a library may compile functions that the script never calls
        note(*left_out)
        return model

    put(torch, compile=compiled)
    put(nn.Module, compile=noting(*left_out, always(None)))


def _let_the_host_be_profiled() -> None:
    """Leave the GPU out of torch's profiler: a CPU build raises an error inside each operator that it would time there."""
    start = profiler.profile.__init__

    def without_a_gpu(profile: profiler.profile, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        given = signature(start).bind(profile, *args, **kwargs)
        given.arguments.update(use_cuda=False, use_device=None, use_cpu=True)
        start(*given.args, **given.kwargs)

    put(profiler.profile, __init__=noting("torch's profiler", "the GPU is left out", without_a_gpu))


def _always_step(_: object, optimizer: Any, _state: object, *args: object, **kwargs: object) -> object:  # noqa: ANN401
    """Run a gradient scaler's step without its overflow check."""
    return optimizer.step(*args, **kwargs)


def _note_flex_attention(_: object = None) -> None:
    note("flex attention", "flash attention's operator")


def _flex_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, score_mod: object = None, block_mask: object = None,  # noqa: ARG001
    scale: float | None = None, enable_gqa: bool = False, return_lse: bool = False, kernel_options: object = None,  # noqa: ARG001, FBT001, FBT002
    *, return_aux: object = None,
) -> object:  # fmt: skip
    """Run flex attention by flash attention's operator, which keeps the same tensors: the output, and one number per row."""
    if torch.compiler.is_dynamo_compiling():
        comptime(_note_flex_attention)  # once, when the graph is traced
    else:
        _note_flex_attention()
    out = _kept_by_flex(query, key, value, scale)
    if return_aux is not None:
        return out[0], flex.AuxOutput(lse=out[1], max_scores=None)
    return (out[0], out[1]) if return_lse else out[0]


def _kept_by_flex(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None) -> tuple[torch.Tensor, ...]:
    if query.size(-1) == value.size(-1):
        found: tuple[torch.Tensor, ...] = torch.ops.aten._scaled_dot_product_flash_attention(
            query, key, value, 0.0, False, scale=scale
        )
        return found
    result: tuple[torch.Tensor, ...] = _OtherValues.apply(query, key, value)  # type: ignore[no-untyped-call]
    return result


class _OtherValues(torch.autograd.Function):
    """Attention whose values have another size than keys; flex attention supports this, flash attention does not."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: ANN401
        out = query.new_empty((*query.shape[:-1], value.size(-1)))
        rows = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, rows)
        ctx.mark_non_differentiable(rows)
        return out, rows

    @staticmethod
    def backward(ctx: Any, _grad: torch.Tensor, _rows: object) -> tuple[torch.Tensor, ...]:  # noqa: ANN401
        query, key, value, *_ = ctx.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
