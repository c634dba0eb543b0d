"""Sources that several of DeepSpeed's stages share, with the version, and common parts of their formulas."""

STAGE12 = "DeepSpeed 0.19.8, runtime/zero/stage_1_and_2.py"
STAGE3 = "DeepSpeed 0.19.8, runtime/zero/stage3.py"
#: Source of the host's flat weights and gradients at stage 3.
FLAT_ON_HOST = f"{STAGE3}, _create_param_groups_fp16_flat_cpu_memory"

#: A rank's shard of all parameters, flat and padded, below stage 3.
SHARE = "2·ceil(Ψ/(2·N))"
#: Bytes of an element of the copies from which norms are computed.
FP64 = 8
#: Elements of a piece for the norm on the host (``_constant_buffered_norm2``).
NORM_PIECE = 250_000_000
