"""Packages that need CUDA to be installed: a folder at the end of a script's search path, behind installed ones."""
