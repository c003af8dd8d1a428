"""The reader of ONNX files: a network as a draft.  Only ``load`` and ``functions`` import the onnx package."""
