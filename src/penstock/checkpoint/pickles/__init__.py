"""Weights in PyTorch's pickled formats, read without PyTorch and without an object that a pickle could make."""
