"""The memory and traffic of one GPU under each engine: states, buffers and moments. ``account.py`` has the result's types."""
