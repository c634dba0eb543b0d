"""How a framework holds a model: states, buffers and moments, engine by engine."""
