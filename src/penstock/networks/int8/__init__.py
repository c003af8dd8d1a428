"""Networks with int8 convolutions and linears, made from float32 bundles and samples of their inputs."""
