"""Saves dry runs to files, reads them as untrusted data, compares them with real GPUs, and exports them. Needs no torch."""
