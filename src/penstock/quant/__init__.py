"""Quantization: the table of schemes, and the methods that choose integers and scales.

It knows neither networks nor graphs.
"""
