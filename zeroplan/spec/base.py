"""The base of every description: frozen, strict, nothing unknown accepted."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

#: Counts a person may describe; the ceiling keeps every product of interest inside int64.
Count = Annotated[int, Field(gt=0, le=10**15)]
Dimension = Annotated[int, Field(gt=0, le=10**7)]
Degree = Annotated[int, Field(gt=0, le=10**6)]


class Spec(BaseModel):
    """A frozen description of something; equal descriptions are equal and hash alike."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")
