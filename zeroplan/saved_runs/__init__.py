"""Saves dry runs as files, reads them as untrusted data, compares them, and exports them. Needs no torch."""
