"""What a CPU run shows of a line whose number follows CUDA: every known difference, by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zeroplan.transformer.families.attention import FLASH_SCRATCH
from zeroplan.transformer.families.mlp import FP32_ON_CUDA
from zeroplan.transformer.families.norms import STATISTICS

if TYPE_CHECKING:
    from zeroplan.ledger import Line
    from zeroplan.transformer.blocks import Compute


def cpu_bytes(lines: tuple[Line, ...], compute: Compute) -> int:
    """Sum the lines as a CPU would have them."""
    return sum(_bytes(line, compute) for line in lines)


def _bytes(line: Line, compute: Compute) -> int:
    assert isinstance(line.n_bytes, int)
    if line.reason == FLASH_SCRATCH:
        return 0  # the CPU kernel has its own, smaller
    if FP32_ON_CUDA in line.reason:
        return line.n_bytes // 2  # pow stays in bf16 under the CPU's autocast
    if line.reason.endswith(STATISTICS) and not compute.autocast:
        return line.n_bytes * compute.element_bytes // 4  # LayerNorm statistics have the input's dtype
    return line.n_bytes
