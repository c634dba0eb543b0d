"""A double of ``flash_attn`` for machines on which it cannot be installed."""

from .flash_attn_interface import (
    flash_attn_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)

__version__ = "2.8.3"
__all__ = [
    "flash_attn_func", "flash_attn_qkvpacked_func", "flash_attn_varlen_func", "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]  # fmt: skip
