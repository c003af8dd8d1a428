"""The tensors of a checkpoint folder as they are stored: their files, and those that no network needs."""
