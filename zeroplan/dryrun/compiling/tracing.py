"""Dynamo among fake tensors: it traces what the script compiles, and what watches the run is no part of a graph.

The modes that make tensors fake and record memory are off while torch compiles, and on while the result runs. Hooks that hear of
every module are called around ``Module._call_impl``, because dynamo breaks its graphs at global hooks.
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
from zeroplan.dryrun.stood_in import note
from zeroplan.dryrun.watcher import ScriptTracker
from zeroplan.verify.fake_cuda.stand_ins import count_as_library, line_at
from zeroplan.verify.replaced import put

_TRACED = {"card", "process_group", "stood_in", "torch_around", "torch_cuda"}
"""Modules of ours whose functions take the place of what a script calls: graphs go through them."""
_LONGEST_REASON = 200
"""Of an error. [signs]"""
_LEFT_OUT = {
    "triton.cudagraphs": ("CUDA graphs", "left out, and so are the private pools of their memory"),
    "max_autotune": ("torch.compile's autotuning", "left out, inductor takes the kernels that it takes without"),
    "coordinate_descent_tuning": ("torch.compile's autotuning", "left out, inductor takes the kernels that it takes without"),
}  # fmt: skip

_WRAPPED = "wrap_inductor_compiled_regions"
"""Shows a program to modes as one operator of higher order; those that record a run are to see what is inside."""


def why_not() -> str:
    """Why this torch's compiler cannot be followed; empty where it can."""
    if not hasattr(TorchDispatchMode, "ignore_compile_internals"):
        return f"torch {torch.__version__} compiles nothing while a mode watches"
    return ""


def know_functions_by_name() -> None:
    """Have dynamo look up torch's own functions while they are still torch's. To be called before anything is replaced."""
    from torch._dynamo import trace_rules  # noqa: PLC0415  not all scripts compile
    from torch._dynamo.variables.torch import TorchInGraphFunctionVariable  # noqa: PLC0415

    trace_rules.get_torch_obj_rule_map()
    TorchInGraphFunctionVariable._get_handlers()
    put(trace_rules, clear_lru_cache=lambda: None)  # a new process group clears it, and what is replaced would be looked up


def follow_the_compiler(tracker: ScriptTracker) -> None:
    """Have ``torch.compile`` compile, to the end of the process."""
    import torch._dynamo.config as dynamo_config  # noqa: PLC0415
    from torch._dynamo import convert_frame  # noqa: PLC0415

    count_as_library(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    dynamo_config.suppress_errors = True  # what cannot be compiled runs as it is, and is noted
    put(FakeTensorMode, avoid_device_init=property(lambda _: True))
    put(convert_frame, _compile=_watched(convert_frame._compile, tracker))
    put(torch, compile=_compile(torch.compile))


def _watched(compile_frame: Callable[..., Any], tracker: ScriptTracker) -> Callable[..., Any]:
    """Dynamo's work on one frame: nobody watches, and a failure is noted with the function that then runs as it is."""

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
    """Whether the compiler broke; what it cannot trace splits a graph, on a GPU too."""
    from torch._dynamo import exc  # noqa: PLC0415

    return not isinstance(error, exc.Unsupported | exc.SkipFrame | exc.RestartAnalysis)


def _compile(make: Callable[..., Any]) -> Callable[..., Any]:
    """``torch.compile`` without what needs kernels that run: graphs of CUDA's, and tuning."""

    def compiled(model: Any = None, *, mode: str | None = None, options: Mapping[str, Any] | None = None, **others: Any) -> Any:  # noqa: ANN401
        asked = dict(options or {})
        if mode not in (None, "default") and others.get("backend") in (None, "inductor"):
            from torch._inductor import list_mode_options  # noqa: PLC0415

            asked = {**list_mode_options(mode), **asked}
        if others.get("backend") == "cudagraphs":
            others["backend"], asked = "aot_eager", {"triton.cudagraphs": True}
        for name in {name for name in asked if name in _LEFT_OUT and asked[name]}:
            note(*_LEFT_OUT[name])
        kept = {name: value for name, value in asked.items() if name not in _LEFT_OUT and name != _WRAPPED}
        return make(model, options=kept or None, **others)

    return compiled


def call_hooks_outside_of_graphs() -> None:
    """Call the global hooks that are there now around every module's call, and have dynamo see none."""
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

    def _call_impl(module: nn.Module, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  dynamo knows it by this name
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
    _leave_ourselves_out()


def _leave_ourselves_out() -> None:
    """Dynamo is to trace nothing of ours but what takes the place of torch's functions, a module's call within others alone."""
    from torch._dynamo import trace_rules  # noqa: PLC0415

    for name in [name for name in sys.modules if name.partition(".")[0] == "zeroplan"]:
        if name.rpartition(".")[2] not in _TRACED and not hasattr(sys.modules[name], "__path__"):
            trace_rules.add(name)
    trace_rules.get_mod_inlinelist().add(__file__)
