"""The Open Inference Protocol over REST: bodies, tensors, statistics, repository."""
