"""How much memory would a user's script need as one rank of N? Runs it without a GPU; begin at ``launch.py``."""
