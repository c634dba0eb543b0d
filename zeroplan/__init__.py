"""Per-GPU memory of ZeRO and FSDP training, byte by byte.

>>> from zeroplan import estimate, job
>>> answer = estimate(job(params="7e9", gpus=8, stage=3))
>>> round(sum(answer.states_by_kind.values()) / 1e9, 2)
14.0
"""

TYPE_CHECKING = False  # type checkers treat this name like typing.TYPE_CHECKING; it saves importing typing
if TYPE_CHECKING:
    from zeroplan.differences import Changed, Difference, diff
    from zeroplan.errors import MeasurementError, SpecError, UnknownNameError, ZeroplanError
    from zeroplan.estimator import Estimate, estimate
    from zeroplan.ledger import Band, Collective, Kind, Line, Moment, Phase
    from zeroplan.resolve import Request, job
    from zeroplan.spec.batch import BatchSpec
    from zeroplan.spec.hardware import ClusterSpec, GpuSpec
    from zeroplan.spec.job import JobSpec
    from zeroplan.spec.mesh import MeshSpec
    from zeroplan.spec.model import LinearSpec, MlaSpec, ModelSpec, MoeSpec
    from zeroplan.spec.recipe import DdpOptions, DeepSpeedOptions, Fsdp2Options, MegatronOptions, RecipeSpec

__version__ = "0.1.0"

__all__ = [
    "Band",
    "BatchSpec",
    "Changed",
    "ClusterSpec",
    "Collective",
    "DdpOptions",
    "DeepSpeedOptions",
    "Difference",
    "Estimate",
    "Fsdp2Options",
    "GpuSpec",
    "JobSpec",
    "Kind",
    "Line",
    "LinearSpec",
    "MeasurementError",
    "MegatronOptions",
    "MeshSpec",
    "MlaSpec",
    "ModelSpec",
    "MoeSpec",
    "Moment",
    "Phase",
    "RecipeSpec",
    "Request",
    "SpecError",
    "UnknownNameError",
    "ZeroplanError",
    "diff",
    "estimate",
    "job",
]

#: The submodule of each public name. They are imported on first use, so that `import zeroplan` is fast.
_HOMES = {
    "differences": ("Changed", "Difference", "diff"),
    "errors": ("MeasurementError", "SpecError", "UnknownNameError", "ZeroplanError"),
    "estimator": ("Estimate", "estimate"),
    "ledger": ("Band", "Collective", "Kind", "Line", "Moment", "Phase"),
    "resolve": ("Request", "job"),
    "spec.batch": ("BatchSpec",),
    "spec.hardware": ("ClusterSpec", "GpuSpec"),
    "spec.job": ("JobSpec",),
    "spec.mesh": ("MeshSpec",),
    "spec.model": ("LinearSpec", "MlaSpec", "ModelSpec", "MoeSpec"),
    "spec.recipe": ("DdpOptions", "DeepSpeedOptions", "Fsdp2Options", "MegatronOptions", "RecipeSpec"),
}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Import a public name on first use."""
        from importlib import import_module  # noqa: PLC0415  keeps `import zeroplan` fast

        home = next((home for home, names in _HOMES.items() if name in names), None)
        if home is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return globals().setdefault(name, getattr(import_module(f"{__name__}.{home}"), name))
