"""One rank, measured: on fake tensors, on a CPU, on a GPU."""
