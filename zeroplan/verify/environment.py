"""The environment of a measurement: Python, platform, package versions, date."""

import platform
from datetime import UTC, datetime
from importlib import metadata

from zeroplan import __version__
from zeroplan.measurement import Environment

_PACKAGES = ("torch", "transformers", "deepspeed", "accelerate", "megatron-core")


def environment(*, device: str = "") -> Environment:
    """Describe this interpreter and the installed packages that matter to a measurement."""
    return Environment(
        python=platform.python_version(),
        platform=platform.platform(),
        packages={"zeroplan": __version__, **{name: version for name in _PACKAGES if (version := _version(name))}},
        device=device,
        date=datetime.now(UTC).date().isoformat(),
    )


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""
