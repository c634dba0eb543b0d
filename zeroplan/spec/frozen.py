"""The frozen parameters of a model without adapters."""

from typing import Annotated

from zeroplan.errors import SpecError
from zeroplan.spec.base import Range, Spec

#: Parts outside the blocks that can be frozen.
PARTS = ("embedding", "norm", "head")


class FrozenSpec(Spec):
    """The parameters with ``requires_grad_(False)``: parts outside the blocks, and the first ``layers`` blocks.

    >>> FrozenSpec(parts="head, embedding", layers=8).names
    ('embedding', 'head')
    """

    parts: str = ""
    """Names from ``embedding``, ``norm`` (the one before the head) and ``head``, separated by commas."""
    layers: Annotated[int, Range(0, 10**4)] = 0

    def check_rules(self) -> None:
        """Raise SpecError for unknown names, and if nothing is frozen."""
        for name in self.parts.split(",") if self.parts else ():
            if name.strip() not in PARTS:
                raise SpecError(f"no part {name.strip()!r} can be frozen; there are {', '.join(PARTS)}, and --freeze-layers")
        if not self.parts and not self.layers:
            raise SpecError("nothing is frozen; name some parts (embedding,head) or a number of layers")

    @property
    def names(self) -> tuple[str, ...]:
        """The frozen parts, in the model's order."""
        named = {name.strip() for name in self.parts.split(",")}
        return tuple(name for name in PARTS if name in named)
