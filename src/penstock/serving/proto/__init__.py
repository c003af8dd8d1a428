"""Protocol buffer messages and their generated code."""
