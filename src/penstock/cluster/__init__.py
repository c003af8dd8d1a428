"""Many replicas of one model: which one serves a request, and a simulator of them."""
