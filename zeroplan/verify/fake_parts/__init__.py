"""Replaces the parts that a simulated run lacks: kernels, values of fake tensors, other ranks, a disk."""
