"""Runs a user's own training script as one rank of N without a GPU, and measures the memory it would need."""
