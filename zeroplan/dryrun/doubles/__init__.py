"""Doubles of packages that need CUDA, in a folder at the end of the script's search path, after installed packages."""
