"""The graph: capture, passes, bundles, export.  Knows no program that runs it."""
