"""Networks and Python functions as a service.  It may import engines and LLMs, but neither HTTP nor gRPC."""
