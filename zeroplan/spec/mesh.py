"""How the ranks are arranged: degrees of parallelism, each an int in a job and an int or a column in a formula."""

from dataclasses import dataclass
from typing import Protocol

from zeroplan.numeric import Int
from zeroplan.spec.base import Degree, Spec


class Mesh(Protocol):
    """What a formula may ask of a layout."""

    @property
    def dp_replicate(self) -> Int:
        """Replicas of the sharded group (HSDP); 1 without replicas."""
        ...

    @property
    def dp_shard(self) -> Int:
        """Ranks that share one copy of what the ZeRO stage shards. With stage 0, the data-parallel ranks."""
        ...

    @property
    def tp(self) -> Int:
        """Tensor-parallel ranks."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshSpec(Spec):
    """Degrees of parallelism of one job."""

    dp_replicate: Degree = 1
    dp_shard: Degree = 1
    tp: Degree = 1

    @property
    def world_size(self) -> int:
        """All ranks."""
        return self.dp_replicate * self.dp_shard * self.tp
