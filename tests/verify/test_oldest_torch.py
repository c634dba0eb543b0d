"""Runs start with torch 2.11, the oldest version that GPU machines may have: they import no private name that is newer.

Torch's private names change between versions, and the tests run on one version. So the private names that every run imports
are listed here, under the module of torch 2.11.0 in which each was looked up. A name that 2.11 lacks is imported only where
it is needed; if it is missing there, the run is refused in one line (``zeroplan/verify/training/experts.py``). Needs no torch.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import TYPE_CHECKING

import zeroplan

if TYPE_CHECKING:
    from collections.abc import Iterator

IN_TORCH_2_11 = {
    "torch._C._distributed_c10d": "FakeProcessGroup GradBucket ProcessGroupGloo Reducer Store Work _create_work_from_future",
    "torch._C._profiler": "_EventType _ExtraFields_Allocation _ProfilerEvent",
    "torch._ops": "OpOverload",
    "torch._subclasses.fake_tensor": "DataDependentOutputException FakeTensor "
    "FakeTensorMode disable_fake_tensor_cache in_kernel_invocation_manager unset_fake_temporarily",
    "torch._subclasses": "fake_impls fake_tensor",
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper": "OffloadWrapper offload_wrapper",
    "torch.distributed.algorithms._checkpoint": "checkpoint_wrapper",
    "torch.distributed.distributed_c10d": "_resolve_process_group",
    "torch.distributed.fsdp._fully_shard._fsdp_common": "FSDPMeshInfo HSDPMeshInfo",
    "torch.distributed.fsdp._fully_shard._fsdp_param": "FSDPParam",
    "torch.distributed.fsdp._fully_shard._fsdp_param_group": "FSDPParamGroup",
    "torch.distributed.fsdp._fully_shard": "_fsdp_common _fsdp_param _fsdp_param_group _fully_shard",
    "torch.distributed.pipelining.schedules": "_PipelineSchedule",
    "torch.distributed.tensor._op_schema": "OpSchema",
    "torch.distributed.tensor._sharding_prop": "ShardingPropagator",
    "torch.distributed.tensor": "_sharding_prop",
    "torch.optim": "_adafactor",
    "torch.testing._internal.distributed.fake_pg": "FakeStore _create_fake_pg",
    "torch.utils._pytree": "tree_map_only",
    "torch.utils._python_dispatch": "TorchDispatchMode _disable_current_modes",
    "torch.utils.backend_registration": "_setup_privateuseone_for_python_backend",
    "torch": "_meta_registrations",
}


VERIFY = Path(zeroplan.__file__).parent / "verify"
#: Modules that a process imports before it knows its job. The others are imported where a job needs them.
FIRST = (
    "worker", "processes.worker", "processes.warm", "processes.rank", "training.workload", "training.user_workload",
    "backends.gpu_ready", "backends.cuda", "backends.cpu", "backends.simulate", "training.deepspeed", "watching.group",
)  # fmt: skip


def file_of(name: str) -> Path:
    return VERIFY / f"{name.replace('.', '/')}.py"


def imports_of(path: Path) -> list[ast.ImportFrom]:
    """Return the ``from`` imports at the top level of a file."""
    return [node for node in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(node, ast.ImportFrom)]


def imported_first() -> list[Path]:
    """Return the files of ``zeroplan.verify`` that every run imports."""
    found, pending = set[str](), list(FIRST)
    assert all(file_of(name).exists() for name in FIRST)
    while pending:
        name = pending.pop()
        if name in found or not file_of(name).exists():
            continue
        found.add(name)
        for node in imports_of(file_of(name)):
            within, _, inside = (node.module or "").partition("zeroplan.verify.")
            if not within and inside:  # a module, or a package from which modules are imported
                pending += [inside, *(f"{inside}.{alias.name}" for alias in node.names)]
    return [file_of(name) for name in sorted(found)]


def imported() -> Iterator[tuple[str, str, str]]:
    """Yield file, module and name of every private name of torch that every run imports."""
    for path in imported_first():
        for node in imports_of(path):
            if node.module and node.module.partition(".")[0] == "torch":
                for name in (alias.name for alias in node.names):
                    if "._" in node.module or name.startswith("_"):
                        yield path.name, node.module, name


def test_private_names_of_torch_are_in_the_oldest_supported_version():
    found = list(imported())
    known = {name for names in IN_TORCH_2_11.values() for name in names.split()}
    assert len(found) > len(known) // 2
    newer = [one for one in found if one[2] not in known]
    assert not newer, f"look these up in torch 2.11: {newer}"
