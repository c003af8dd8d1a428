"""Commands of the online service: serve, worker, models, new.  Imports ``serving`` and ``client``."""
