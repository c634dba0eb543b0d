"""Measures one rank: on fake tensors, on a CPU, on a GPU."""
