"""Frames that zeroplan's own snapshots have beside those of code: a block's operator, module, kind and phase by name."""

OPERATOR, MODULE = "zeroplan: operator", "zeroplan: module"
KIND_OF_BLOCK, PHASE = "zeroplan: kind", "zeroplan: phase"
