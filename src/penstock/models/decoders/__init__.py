"""Decoders with RMS norm, one file per model_type."""
