"""The real engines, run to be measured: the only rooms that know torch."""
