"""Clients of a service over HTTP and gRPC.  They may import only errors, tensors and the generated messages."""
