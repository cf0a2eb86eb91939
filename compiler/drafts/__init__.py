"""Drafts: what a checkpoint says (`config`, `dialects`), how it is read (`loading`), what it computes (`block`, `chain`)."""
