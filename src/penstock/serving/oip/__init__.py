"""The Open Inference Protocol over REST: bodies, tensors, statistics, repository.  It knows no sockets."""
