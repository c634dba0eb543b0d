"""The profile of a script's own model: its forward and its loss run again, at other batches and lengths, without its engine."""
