"""The HTTP listener and the routes that belong to no protocol.  It knows nothing of engines."""
