"""General networks: any module and any ONNX file as a draft, its passes, and the graph that a bundle holds."""
