"""Many cases, one after the other: what they are, what came of each, and whether the estimate was right."""
