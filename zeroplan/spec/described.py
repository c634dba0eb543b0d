"""A job as formulas read it: a complete job, or its four descriptions with columns of numbers."""

from typing import NamedTuple, Protocol

from zeroplan.spec.batch import Batch
from zeroplan.spec.mesh import Mesh
from zeroplan.spec.model import ModelSpec
from zeroplan.spec.recipe import RecipeSpec


class Job(Protocol):
    """What formulas read of a job; the numbers of mesh and batch may be columns."""

    @property
    def model(self) -> ModelSpec:
        """The model."""
        ...

    @property
    def recipe(self) -> RecipeSpec:
        """The training recipe."""
        ...

    @property
    def mesh(self) -> Mesh:
        """The ranks and their arrangement."""
        ...

    @property
    def batch(self) -> Batch:
        """The batch."""
        ...


class JobParts(NamedTuple):
    """The four descriptions of a job, with ints or columns."""

    model: ModelSpec
    recipe: RecipeSpec
    mesh: Mesh
    batch: Batch
