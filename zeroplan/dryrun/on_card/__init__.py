"""Runs the script on real GPUs: as one rank of N on one GPU, or under a launcher on all of them."""
