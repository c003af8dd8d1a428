"""Commands that run a program or a model over several processes and machines."""
