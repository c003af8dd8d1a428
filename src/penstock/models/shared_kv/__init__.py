"""Gemma 3n and 4, whose later layers attend over the keys and values of an earlier layer."""
