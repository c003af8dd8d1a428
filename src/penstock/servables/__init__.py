"""Networks and Python functions as a service.

May import the engine and ``llm``, but no HTTP and no gRPC.  Each sub-package may import only those before it:
``api``, ``process``, ``schedule``, ``lifecycle``, ``machines``.
"""
