"""Text from files without a service: ``penstock.pipeline``, its tasks, and export as a configuration file says."""
