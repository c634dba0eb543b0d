"""Stand-ins for what a simulated run lacks: a GPU, values of fake tensors, other ranks, a disk."""
