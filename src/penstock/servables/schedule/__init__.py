"""The way of a request through a method: queues, batches, results.  May import ``api`` and ``process``."""
