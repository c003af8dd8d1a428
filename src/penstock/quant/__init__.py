"""Quantization: the table of schemes, and the methods that choose integers and scales."""
