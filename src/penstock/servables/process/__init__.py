"""The processes that run stages and models, and the messages they exchange with the primary.  May import ``api``."""
