"""Runs dynamo on fake tensors: it traces the code that the script compiles, and skips zeroplan's own code.

The modes that make tensors fake and record memory are off while torch compiles, and on while the compiled code runs. Global module
hooks are called around ``Module._call_impl`` instead, because dynamo breaks graphs at global hooks.
"""

import os
import sys
from collections.abc import Callable, Mapping
from types import CodeType
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules import module as modules
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from zeroplan.dryrun.compiling import inductor
from zeroplan.dryrun.replacements import note
from zeroplan.dryrun.watcher import ScriptTracker
from zeroplan.verify.fake_cuda.stand_ins import count_as_library, line_at
from zeroplan.verify.replaced import put

_TRACED = {"attention", "process_group", "replaced", "replacements", "torch_cuda", "torch_patches"}
"""zeroplan's modules that replace torch functions; dynamo traces them like torch."""
_LONGEST_REASON = 200
"""Longest part of an error message to show. [characters]"""
_LEFT_OUT = {
    "triton.cudagraphs": ("CUDA graphs", "left out, with their private memory pools"),
    "max_autotune": ("torch.compile's autotuning", "left out; inductor chooses kernels without it"),
    "coordinate_descent_tuning": ("torch.compile's autotuning", "left out; inductor chooses kernels without it"),
}  # fmt: skip

_WRAPPED = "wrap_inductor_compiled_regions"
"""With this option modes see a program as one higher-order operator, but a recording needs the operators inside."""


def why_not() -> str:
    """The reason why zeroplan cannot run this torch's compiler; empty if it can."""
    if not hasattr(TorchDispatchMode, "ignore_compile_internals"):
        return f"torch {torch.__version__} compiles nothing while a dispatch mode is active"
    return ""


def preload_dynamo_rules() -> None:
    """Make dynamo look up torch's own functions before they are replaced."""
    from torch._dynamo import trace_rules  # noqa: PLC0415  not all scripts compile
    from torch._dynamo.variables.torch import TorchInGraphFunctionVariable  # noqa: PLC0415

    trace_rules.get_torch_obj_rule_map()
    TorchInGraphFunctionVariable._get_handlers()
    put(
        trace_rules, clear_lru_cache=lambda: None
    )  # a new process group would clear it, and dynamo would then find our replacements


def enable_compiler(tracker: ScriptTracker) -> None:
    """Let ``torch.compile`` compile, for the rest of the process."""
    import torch._dynamo.config as dynamo_config  # noqa: PLC0415
    from torch._dynamo import convert_frame  # noqa: PLC0415

    count_as_library(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    dynamo_config.suppress_errors = True  # code that fails to compile runs uncompiled and is counted
    put(FakeTensorMode, avoid_device_init=property(lambda _: True))
    put(convert_frame, _compile=_watched(convert_frame._compile, tracker))
    put(torch, compile=_compile(torch.compile))


def _watched(compile_frame: Callable[..., Any], tracker: ScriptTracker) -> Callable[..., Any]:
    """Dynamo's compilation of one frame, without modes. After a failure, which is counted, the function runs uncompiled."""

    def compiled(code: CodeType, *args: object, **kwargs: object) -> object:
        inductor.plan_without_a_gpu(tracker)
        try:
            with _disable_current_modes(), inductor.compiling():
                return compile_frame(code, *args, **kwargs)
        except Exception as error:
            if _is_a_failure(error):
                reason = " ".join(str(error).split())[:_LONGEST_REASON]
                note(f"torch.compile of {line_at(code.co_filename, code.co_firstlineno)}", f"left out: {reason}")
            raise

    return compiled


def _is_a_failure(error: Exception) -> bool:
    """Whether the compiler itself failed. Code that it cannot trace is no failure: it breaks the graph on a GPU too."""
    from torch._dynamo import exc  # noqa: PLC0415

    return not isinstance(error, exc.Unsupported | exc.SkipFrame | exc.RestartAnalysis)


def _compile(make: Callable[..., Any]) -> Callable[..., Any]:
    """``torch.compile`` without the options that need running kernels: CUDA graphs and autotuning."""

    def compiled(model: Any = None, *, mode: str | None = None, options: Mapping[str, Any] | None = None, **others: Any) -> Any:  # noqa: ANN401
        wanted = dict(options or {})
        if mode not in (None, "default") and others.get("backend") in (None, "inductor"):
            from torch._inductor import list_mode_options  # noqa: PLC0415

            wanted = {**list_mode_options(mode), **wanted}
        if others.get("backend") == "cudagraphs":
            others["backend"], wanted = "aot_eager", {"triton.cudagraphs": True}
        for name in {name for name in wanted if name in _LEFT_OUT and wanted[name]}:
            note(*_LEFT_OUT[name])
        kept = {name: value for name, value in wanted.items() if name not in _LEFT_OUT and name != _WRAPPED}
        return make(model, options=kept or None, **others)

    return compiled


def call_hooks_outside_of_graphs() -> None:
    """Call the current global hooks around every module's call, and hide them from dynamo."""
    import torch._dynamo.utils as dynamo_utils  # noqa: PLC0415
    from torch._dynamo.variables import nn_module  # noqa: PLC0415

    before, after = list(modules._global_forward_pre_hooks.values()), list(modules._global_forward_hooks.values())
    for hooks in (
        modules._global_forward_pre_hooks,
        modules._global_forward_hooks,
        modules._global_forward_hooks_always_called,
    ):
        hooks.clear()
    call: Callable[..., Any] = nn.Module._call_impl

    def _call_impl(module: nn.Module, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  dynamo looks for this name
        if torch.compiler.is_dynamo_compiling():
            return call(module, *args, **kwargs)
        result = None
        try:
            for hook in before:
                hook(module, args)
            result = call(module, *args, **kwargs)
        finally:
            for hook in after:
                hook(module, args, result)
        return result

    put(nn.Module, _call_impl=_call_impl)
    for owner in (dynamo_utils, nn_module):
        put(owner, unpatched_nn_module_call_impl=_call_impl)
    _exclude_own_modules()


def _exclude_own_modules() -> None:
    """Make dynamo skip our modules, except those that replace torch's functions."""
    from torch._dynamo import trace_rules  # noqa: PLC0415

    for name in [name for name in sys.modules if name.partition(".")[0] == "zeroplan"]:
        if name.rpartition(".")[2] not in _TRACED and not hasattr(sys.modules[name], "__path__"):
            trace_rules.add(name)
    trace_rules.get_mod_inlinelist().add(__file__)
