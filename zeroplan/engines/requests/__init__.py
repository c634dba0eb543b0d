"""A training step as an engine carries it out, request by request: what each asks CUDA's allocator for, and gives back, in order."""
