"""All private names of torch that the fake GPU and dry runs use.

Any torch release may remove some. One test compares this list with the code; another one, and `zeroplan doctor`, report names that
the installed torch lacks. Access to torch's C++ is checked where it is used (:mod:`zeroplan.verify.fake_cuda.cpp`).
"""

import importlib
from pathlib import Path

NAMES = tuple(Path(__file__).with_suffix(".txt").read_text(encoding="utf-8").split())

OF_SOME_BUILDS = {
    "torch._C._cuda_getCurrentRawStream": "only in CUDA builds; elsewhere the fake GPU defines it",
    "torch._C._distributed_c10d._dump_nccl_trace_json": "only in builds with NCCL; elsewhere the fake GPU defines it",
}
"""Names that some builds lack, and why they may."""


def gone() -> list[str]:
    """The names that the installed torch lacks.

    >>> gone()
    []
    """
    return [name for name in NAMES if not exists(name)]


def exists(name: str) -> bool:
    """Whether a dotted name exists: modules are imported, then attributes followed.

    >>> exists("torch.Tensor._make_subclass"), exists("torch._C._no_such_name")
    (True, False)
    """
    parts = name.split(".")
    found, rest = None, parts
    for end in range(1, len(parts) + 1):
        try:
            found = importlib.import_module(".".join(parts[:end]))
        except ImportError:
            break
        rest = parts[end:]
    for part in rest if found is not None else ():
        if not hasattr(found, part):
            return False
        found = getattr(found, part)
    return found is not None


def why_not() -> str:
    """The reason why nothing can run on a fake GPU here; empty if it can."""
    from zeroplan.verify.failures import NotHereError  # noqa: PLC0415  needed only with torch
    from zeroplan.verify.fake_cuda.cpp import require_platform  # noqa: PLC0415  it imports torch

    try:
        require_platform()
    except NotHereError as error:
        return str(error)
    return lacking(gone())


def lacking(names: list[str]) -> str:
    """The error message for missing names, with the way out; empty without any.

    >>> lacking(["torch._C._no_such_name"]).partition(" has ")[2]
    'no torch._C._no_such_name, which a dry run needs; install torch 2.11 to 2.15'
    """
    if not names:
        return ""
    import torch  # noqa: PLC0415  as above

    more = f" and {len(names) - 1} more private names" if len(names) > 1 else ""
    return f"torch {torch.__version__} has no {names[0]}{more}, which a dry run needs; install torch 2.11 to 2.15"
