"""The op table: names, schemas, shape rules, PyTorch references, and the native kernels as PyTorch ops.

Knows no graph.
"""
