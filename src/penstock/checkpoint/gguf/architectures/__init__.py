"""The architectures of GGUF files (``general.architecture``) that Penstock has a network for."""
