"""Runs ``torch.compile`` in a script: torch's own compiler traces, partitions and plans; its kernels are not launched."""
