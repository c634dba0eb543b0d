"""The degrees of parallelism. A job has ints; formulas also accept columns, with one row per layout."""

from typing import Protocol

from zeroplan.errors import SpecError
from zeroplan.numeric import Int
from zeroplan.spec.base import MOST_RANKS, Degree, Spec


class Split(Protocol):
    """The degrees that split a model."""

    @property
    def tp(self) -> Int:
        """Tensor-parallel ranks, which split matrices (and with sequence parallelism the tensors between them)."""
        ...

    @property
    def cp(self) -> Int:
        """Context-parallel ranks, which split a sequence; FSDP2 also shards over them what it shards over ``dp_shard``."""
        ...

    @property
    def pp(self) -> Int:
        """Pipeline-parallel ranks, which split the layers."""
        ...

    @property
    def ep(self) -> Int:
        """Expert-parallel ranks, which split the experts: a subset of the ranks of ``dp_shard · cp · tp``."""
        ...


class Mesh(Split, Protocol):
    """The degrees that formulas read."""

    @property
    def dp_replicate(self) -> Int:
        """Replicas of the sharded group (HSDP); 1 without replicas."""
        ...

    @property
    def dp_shard(self) -> Int:
        """Ranks that shard one copy of the states; with stage 0, the data-parallel ranks."""
        ...


class MeshSpec(Spec):
    """Degrees of parallelism of one job."""

    dp_replicate: Degree = 1
    dp_shard: Degree = 1
    tp: Degree = 1
    cp: Degree = 1
    pp: Degree = 1
    ep: Degree = 1

    def check_rules(self) -> None:
        """Raise SpecError if ``ep`` does not divide the ranks that may hold experts, and for more ranks than ``--gpus`` allows."""
        if self.world_size > MOST_RANKS:
            raise SpecError(
                f"dp_replicate={self.dp_replicate} x dp_shard={self.dp_shard} x tp={self.tp} x cp={self.cp} x pp={self.pp} are "
                f"{self.world_size:,} GPUs; use at most {MOST_RANKS:,}"
            )
        among = self.dp_shard * self.cp * self.tp
        if among % self.ep:
            raise SpecError(
                f"ep={self.ep} does not divide the {among} ranks of dp_shard={self.dp_shard} x cp={self.cp} x tp={self.tp}; "
                "use a factor of them"
            )

    @property
    def model_ranks(self) -> int:
        """Ranks that work on the same sequence: ``tp · cp · pp``."""
        return self.tp * self.cp * self.pp

    @property
    def world_size(self) -> int:
        """All ranks."""
        return self.dp_replicate * self.dp_shard * self.model_ranks
