"""Names of stack frames that only zeroplan's own snapshots contain: a block's operator, module, kind and phase."""

OPERATOR, MODULE = "zeroplan: operator", "zeroplan: module"
KIND_OF_BLOCK, PHASE = "zeroplan: kind", "zeroplan: phase"
