"""Writes checkpoints with holes for tensor values, which occupy no disk space.

Such a file is as large as the checkpoint. ``torch.load`` and safetensors read it like any other in a dry run: names, shapes,
dtypes, and objects other than tensors.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import BinaryIO

import torch
from torch.serialization import skip_data

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
"""Dtypes by their names in safetensors files."""
_NAMES = {dtype: name for name, dtype in DTYPES.items()}

Write = Callable[..., None]
"""Called with the arguments of a saving function, but with our file as the target."""


def write_pickle(what: object, file: "str | BinaryIO", *more: object, **options: object) -> None:
    """Write a ``torch.save`` file without tensor values. Raises the errors of pickling."""
    with skip_data(materialize_fake_tensors=True):
        torch.serialization.save(what, file, *more, **options)  # type: ignore[arg-type]


def write_safetensors(tensors: Mapping[str, torch.Tensor], file: str, metadata: Mapping[str, str] | None = None) -> None:
    """Write a ``safetensors.torch.save_file`` file without values. Raises ``KeyError`` for a dtype that the format lacks."""
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with Path(file).open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        out.truncate(8 + len(text) + end)


def write_module(model: torch.nn.Module, file: str, metadata: Mapping[str, str] | None = None, **_: object) -> None:
    """Write a ``safetensors.torch.save_model`` file without values: of tensors that share a storage, only the first."""
    storages = {one.untyped_storage()._cdata: name for name, one in reversed(model.state_dict().items())}
    kept = {name: one for name, one in model.state_dict().items() if storages[one.untyped_storage()._cdata] == name}
    write_safetensors(kept, file, metadata)
