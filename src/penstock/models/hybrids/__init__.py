"""Networks whose layers are not all attention, or whose attention stores something else than keys and values."""
