"""What sees or changes the rows of a request in Python: repeated sequences, hooks of generate, beam search."""
