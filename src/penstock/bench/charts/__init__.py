"""Pictures and traces of measurements: rooflines, timelines, latencies over load."""
