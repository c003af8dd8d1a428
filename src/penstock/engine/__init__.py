"""The engine: scheduler, pages, prefixes, batches, sampling, and the loop that serves every front end."""
