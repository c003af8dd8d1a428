"""Requests through the steps of a method: queues, batches, results."""
