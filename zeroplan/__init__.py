"""Per-GPU memory of ZeRO and FSDP training, byte by byte.

>>> from zeroplan import estimate, job
>>> answer = estimate(job(params="7e9", gpus=8, stage=3))
>>> round(sum(answer.states_by_kind.values()) / 1e9, 2)
14.0
"""

from zeroplan.errors import MeasurementError, SpecError, UnknownNameError, ZeroplanError
from zeroplan.estimator import Estimate, estimate
from zeroplan.ledger import Band, Collective, Kind, Line, Moment, Phase
from zeroplan.resolve import Request, job
from zeroplan.spec.batch import BatchSpec
from zeroplan.spec.hardware import ClusterSpec, GpuSpec
from zeroplan.spec.job import JobSpec
from zeroplan.spec.mesh import MeshSpec
from zeroplan.spec.model import MlaSpec, ModelSpec, MoeSpec
from zeroplan.spec.recipe import DdpOptions, DeepSpeedOptions, Fsdp2Options, MegatronOptions, RecipeSpec

__version__ = "0.1.0"

__all__ = [
    "Band",
    "BatchSpec",
    "ClusterSpec",
    "Collective",
    "DdpOptions",
    "DeepSpeedOptions",
    "Estimate",
    "Fsdp2Options",
    "GpuSpec",
    "JobSpec",
    "Kind",
    "Line",
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
    "estimate",
    "job",
]
