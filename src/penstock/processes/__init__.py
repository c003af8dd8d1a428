"""Child processes: framed messages, supervision, and the end of orphans.  It knows nothing of models."""
