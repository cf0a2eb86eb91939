"""Drives a build: command line, checkpoints, draft modules, tracing, the step, the pipeline."""
