"""Checkpoint folders that other tools quantized: GPTQ, AWQ, compressed-tensors and FP8.

Each format becomes matrices under the names of a float checkpoint, with their exact values and, where a scheme
computes with them, as the blocks of that scheme.
"""
