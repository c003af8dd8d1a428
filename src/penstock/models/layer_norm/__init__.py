"""Decoders with layer norms."""
