"""What stands in for what is not there: a GPU, the numbers of fake tensors, other ranks, a disk."""
