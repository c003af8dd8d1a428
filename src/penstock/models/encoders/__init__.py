"""Encoders: each token attends to all tokens of its prompt.  One file per model_type."""
