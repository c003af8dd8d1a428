"""Protocol buffer messages and their generated code.  It imports nothing of the package."""
