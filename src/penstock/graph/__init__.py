"""The graph: capture, passes, bundles, export."""
