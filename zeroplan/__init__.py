"""Per-GPU memory of ZeRO and FSDP training, byte by byte."""
