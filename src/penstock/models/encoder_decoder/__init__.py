"""Encoder-decoders, one file per model_type."""
