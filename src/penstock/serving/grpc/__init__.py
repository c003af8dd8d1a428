"""The gRPC listener and its services.  Imported only where gRPC is asked for."""
