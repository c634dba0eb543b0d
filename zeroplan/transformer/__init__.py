"""What a model costs before anyone shards it: parameters, activations, head and loss, FLOPs."""
