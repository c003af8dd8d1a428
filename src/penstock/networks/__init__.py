"""General networks for users: capture a module, read an ONNX file, write a bundle, run it."""
