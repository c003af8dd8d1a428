"""The gRPC listener and its services.  It is imported only if gRPC is enabled."""
