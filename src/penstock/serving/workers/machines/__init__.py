"""Workers of other machines: how they join over TLS, and what their listener refuses."""
