"""Quantization: schemes, and the methods that choose integers and scales."""
