"""All private names of torch that the fake GPU and dry runs use.

Any torch release may remove some. One test compares this list with the code; another one, and `zeroplan doctor`, report names that
the installed torch lacks. Access to torch's C++ is checked where it is used (:mod:`zeroplan.verify.fake_cuda.cpp`).
"""

import importlib

NAMES = (
    "torch.Tensor._make_subclass", "torch._C.TensorBase.data", "torch._C._acc.DeviceGuard",
    "torch._C._acc.register_python_privateuseone_device_guard", "torch._C._accelerator_getAccelerator",
    "torch._C._autograd.DeviceType.CUDA", "torch._C._autograd._get_sequence_nr", "torch._C._current_autograd_node",
    "torch._C._dispatch_get_all_op_names", "torch._C._dispatch_has_kernel_for_dispatch_key",
    "torch._C._distributed_c10d.FakeProcessGroup.Options", "torch._C._distributed_c10d.FakeProcessGroup._create_internal",
    "torch._C._distributed_c10d.FakeWork.wait", "torch._C._distributed_c10d.ProcessGroupGloo",
    "torch._C._distributed_c10d.Reducer.prepare_for_forward", "torch._C._distributed_c10d.Store",
    "torch._C._distributed_c10d.Work", "torch._C._distributed_c10d._create_work_from_future",
    "torch._C._distributed_c10d._resolve_process_group", "torch._C._dynamo.guards", "torch._C._profiler._EventType.Allocation",
    "torch._C._profiler._ExtraFields_Allocation", "torch._C._profiler._ProfilerEvent", "torch._C._storage_Use_Count",
    "torch._C._swap_tensor_impl",
    "torch._dynamo.comptime.comptime", "torch._dynamo.config.suppress_errors", "torch._dynamo.convert_frame._compile",
    "torch._dynamo.exc.RestartAnalysis", "torch._dynamo.exc.SkipFrame", "torch._dynamo.exc.Unsupported",
    "torch._dynamo.trace_rules.add", "torch._dynamo.trace_rules.clear_lru_cache",
    "torch._dynamo.trace_rules.get_mod_inlinelist", "torch._dynamo.trace_rules.get_torch_obj_rule_map", "torch._dynamo.utils",
    "torch._dynamo.variables.nn_module", "torch._dynamo.variables.torch.TorchInGraphFunctionVariable._get_handlers",
    "torch._functorch.partitioners.functionalize_rng_ops", "torch._has_compatible_shallow_copy_type",
    "torch._inductor.async_compile.AsyncCompile.cpp", "torch._inductor.async_compile.AsyncCompile.cpp_pybinding",
    "torch._inductor.async_compile.AsyncCompile.triton", "torch._inductor.codecache.PyCodeCache.load_by_key_path",
    "torch._inductor.compile_fx._compile_fx_inner", "torch._inductor.config.patch",
    "torch._inductor.graph.GraphLowering._compile_to_module_lines", "torch._inductor.list_mode_options",
    "torch._inductor.scheduler.has_triton", "torch._meta_registrations._create_grouped_mm_output_tensor",
    "torch._meta_registrations._meta_grouped_mm_common", "torch._ops.OpOverload",
    "torch._prims_common.is_non_overlapping_and_dense_or_false", "torch._subclasses.fake_impls.op_implementations_dict",
    "torch._subclasses.fake_tensor.DataDependentOutputException", "torch._subclasses.fake_tensor.DynamicOutputShapeException",
    "torch._subclasses.fake_tensor.FakeTensor.__new__", "torch._subclasses.fake_tensor.FakeTensor.data",
    "torch._subclasses.fake_tensor.FakeTensor.tolist",
    "torch._subclasses.fake_tensor.FakeTensorMode.avoid_device_init",
    "torch._subclasses.fake_tensor.UnsupportedOperatorException",
    "torch._subclasses.fake_tensor.disable_fake_tensor_cache", "torch._subclasses.fake_tensor.in_kernel_invocation_manager",
    "torch._subclasses.fake_tensor.init_gpu_context", "torch._subclasses.fake_tensor.unset_fake_temporarily",
    "torch.amp.GradScaler._maybe_opt_step", "torch.cpu._current_stream", "torch.cpu._default_cpu_stream",
    "torch.cuda._DeviceGuard", "torch.cuda._lazy_init", "torch.cuda.memory._dump_snapshot",
    "torch.cuda.memory._record_memory_history",
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.CheckpointWrapper",
    "torch.distributed.checkpoint.state_dict._init_optim_state", "torch.distributed.distributed_c10d._resolve_process_group",
    "torch.distributed.distributed_c10d._world.pg_names", "torch.distributed.fsdp._flat_param.FlatParamHandle",
    "torch.distributed.fsdp._fully_shard._fsdp_param._chunk_with_empty", "torch.distributed.fsdp._runtime_utils",
    "torch.distributed.tensor._op_schema.OpSchema",
    "torch.distributed.tensor._sharding_prop.ShardingPropagator._propagate_tensor_meta_non_cached",
    "torch.nn.Module._call_impl", "torch.nn.init._no_grad_trunc_normal_",
    "torch.nn.modules.module._global_forward_hooks.values", "torch.nn.modules.module._global_forward_hooks_always_called",
    "torch.nn.modules.module._global_forward_pre_hooks.values", "torch.ops._c10d_functional.all_to_all_single",
    "torch.ops._c10d_functional.wait_tensor.default",
    "torch.ops._dtensor", "torch.ops._dtensor.shard_dim_alltoall", "torch.ops._dtensor.shard_dim_alltoall.default",
    "torch.ops.aten._efficient_attention_backward.default", "torch.ops.aten._efficient_attention_forward.default",
    "torch.ops.aten._flash_attention_backward.default", "torch.ops.aten._flash_attention_forward",
    "torch.ops.aten._local_scalar_dense.default", "torch.ops.aten._scaled_dot_product_flash_attention_backward.default",
    "torch.ops.aten._scaled_dot_product_attention_math", "torch.ops.aten._scaled_dot_product_efficient_attention",
    "torch.ops.aten._scaled_dot_product_efficient_attention_backward.default",
    "torch.ops.aten._scaled_dot_product_efficient_attention.default",
    "torch.ops.aten._scaled_dot_product_flash_attention", "torch.ops.aten._to_copy.default", "torch.optim._adafactor",
    "torch.optim.optimizer._foreach_supported_types.append", "torch.overrides._get_current_function_mode_stack",
    "torch.overrides._pop_mode", "torch.overrides._push_mode", "torch.testing._internal.distributed.fake_pg.FakeStore",
    "torch._utils._restore_device_fake_mode", "torch.utils._device.DeviceContext", "torch.utils._mode_utils.no_dispatch",
    "torch.utils._python_dispatch.TorchDispatchMode", "torch.utils._python_dispatch._disable_current_modes",
    "torch.utils._python_dispatch._pop_mode", "torch.utils._python_dispatch._push_mode", "torch.utils._pytree.TreeSpec",
    "torch.utils._pytree.keystr", "torch.utils._pytree.tree_flatten", "torch.utils._pytree.tree_flatten_with_path",
    "torch.utils._pytree.tree_leaves", "torch.utils._pytree.tree_map_only", "torch.utils._pytree.tree_unflatten",
    "torch.utils._triton.triton_hash_with_backend",
)  # fmt: skip

OF_SOME_BUILDS = {
    "torch._C._cuda_getCurrentRawStream": "only in CUDA builds; elsewhere the fake GPU defines it",
    "torch._C._distributed_c10d._dump_nccl_trace_json": "only in builds with NCCL; elsewhere the fake GPU defines it",
}
"""Names that some builds lack, and why they may."""


def gone() -> list[str]:
    """The names that the installed torch lacks.

    >>> gone()
    []
    """
    return [name for name in NAMES if not exists(name)]


def exists(name: str) -> bool:
    """Whether a dotted name exists: modules are imported, then attributes followed.

    >>> exists("torch.Tensor._make_subclass"), exists("torch._C._no_such_name")
    (True, False)
    """
    parts = name.split(".")
    found, rest = None, parts
    for end in range(1, len(parts) + 1):
        try:
            found = importlib.import_module(".".join(parts[:end]))
        except ImportError:
            break
        rest = parts[end:]
    for part in rest if found is not None else ():
        if not hasattr(found, part):
            return False
        found = getattr(found, part)
    return found is not None


def why_not() -> str:
    """The reason why nothing can run on a fake GPU here; empty if it can."""
    from zeroplan.verify.failures import NotHereError  # noqa: PLC0415  needed only with torch
    from zeroplan.verify.fake_cuda.cpp import require_platform  # noqa: PLC0415  it imports torch

    try:
        require_platform()
    except NotHereError as error:
        return str(error)
    return lacking(gone())


def lacking(names: list[str]) -> str:
    """The error message for missing names, with the way out; empty without any.

    >>> lacking(["torch._C._no_such_name"]).partition(" has ")[2]
    'no torch._C._no_such_name, which a dry run needs; install torch 2.11 to 2.15'
    """
    if not names:
        return ""
    import torch  # noqa: PLC0415  as above

    more = f" and {len(names) - 1} more private names" if len(names) > 1 else ""
    return f"torch {torch.__version__} has no {names[0]}{more}, which a dry run needs; install torch 2.11 to 2.15"
