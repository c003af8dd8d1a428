"""Commands that measure: bench, profile.  Imports ``bench``."""
