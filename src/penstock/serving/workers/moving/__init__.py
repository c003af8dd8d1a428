"""Open requests go from one worker to another."""
