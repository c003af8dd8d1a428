"""Quantization with data: calibration texts, statistics of the inputs of linears, and the methods that use them."""
