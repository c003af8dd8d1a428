"""Tensors without values and modules without PyTorch: what a network is made of while it is captured.

It knows the form of networks, and no op, layer or graph.
"""
