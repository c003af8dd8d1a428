"""Commands that measure: bench, profile."""
