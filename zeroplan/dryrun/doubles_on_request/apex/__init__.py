"""A double of ``apex``: its norms and its Adam."""

from . import normalization, optimizers

__all__ = ["normalization", "optimizers"]
