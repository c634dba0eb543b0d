"""Dry runs as files: saved, read as untrusted data, held against each other, and written for other tools. Needs no torch."""
