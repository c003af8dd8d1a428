"""Decoders whose feed-forward layers are mixtures of experts, one file per model_type."""
