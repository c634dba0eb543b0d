"""Writes a job for the program that runs it: a command line, a configuration file, a script."""
