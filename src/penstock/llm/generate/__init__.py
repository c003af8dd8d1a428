"""Generation by the options of transformers' ``generate``: beams, and functions that see or change rows of logits."""
