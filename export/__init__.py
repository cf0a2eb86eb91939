"""Graph to artefact: ONNX files, the engine directory, its manifest and reports."""
