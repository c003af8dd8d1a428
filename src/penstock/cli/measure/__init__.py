"""Commands that measure: bench, profile, doctor.  Imports ``bench``."""
