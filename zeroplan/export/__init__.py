"""A job, written for what runs it: a command line, a configuration file, a script."""
