"""A user's own training script, run as one rank of N without a GPU: what would it take?"""
