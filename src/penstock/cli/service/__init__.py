"""Commands of the online service: serve, worker, models, new."""
