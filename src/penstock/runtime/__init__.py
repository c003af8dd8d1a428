"""Programs: an opened model that runs batches, natively or in eager mode.  It knows no requests."""
