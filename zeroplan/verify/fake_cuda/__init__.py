"""A CUDA GPU that is not there: torch takes fake tensors for tensors on it, and code that asks for one runs as it is."""
