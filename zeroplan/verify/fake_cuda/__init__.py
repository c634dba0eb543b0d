"""A fake CUDA GPU: torch places fake tensors on it, and code that asks for a GPU runs unchanged."""
