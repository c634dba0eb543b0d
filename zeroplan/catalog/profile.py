"""Reads the file that ``zeroplan profile`` writes; needs no torch."""

from pathlib import Path

from zeroplan.catalog.text import shown, written_json
from zeroplan.errors import SpecError
from zeroplan.spec.base import read
from zeroplan.spec.model import ModelSpec
from zeroplan.spec.profile import SCHEMA_VERSION, Profile, model_of


def read_profile(named: str) -> ModelSpec:
    """Return the model that a profile describes.

    Raises :class:`~zeroplan.errors.SpecError`, in one line, for anything but a profile: a missing file, a folder, incomplete or
    other JSON, another version, figures out of range, inconsistent parts.
    """
    if not named:
        raise SpecError("--profile '' names no file; give the path of what `zeroplan profile` wrote")
    data = written_json(Path(named), what="profile")
    if not isinstance(data, dict) or "schema_version" not in data or "variants" not in data:
        raise SpecError(f"profile {named!r} is JSON, but not of `zeroplan profile`: it has no schema_version and variants")
    if data["schema_version"] != SCHEMA_VERSION:
        raise SpecError(
            f"profile {named!r} has schema version {shown(data['schema_version'])}, and this zeroplan reads {SCHEMA_VERSION}; "
            "make it anew"
        )
    return model_of(read(Profile, data, where=f"profile {named!r}"))
