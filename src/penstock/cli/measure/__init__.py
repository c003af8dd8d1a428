"""Commands that measure: bench, profile, doctor."""
