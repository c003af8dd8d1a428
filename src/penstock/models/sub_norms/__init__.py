"""Decoders with a norm inside attention and feed-forward, before the last projection of each."""
