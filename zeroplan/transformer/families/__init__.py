"""Blocks of the architectures that are modelled tensor by tensor, put together from shared parts."""
