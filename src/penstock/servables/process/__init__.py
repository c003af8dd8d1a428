"""The processes that run stages and models of a servable."""
