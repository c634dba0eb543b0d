"""Writes a job for the program that runs it: as a command line, a configuration file or a script. Start at ``files.py``."""
