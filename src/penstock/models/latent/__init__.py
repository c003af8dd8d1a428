"""Networks with multi-head latent attention: keys and values of all heads are made from one stored row per token."""
