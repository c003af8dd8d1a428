"""The Python functions that see or change rows of a request: repeated sequences, hooks of generate, beam search."""
