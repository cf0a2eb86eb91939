"""The operations a step needs beyond ATen: one folder an op, with its schema, reference and lowerings."""
