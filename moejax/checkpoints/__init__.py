"""Reads and writes checkpoints of Hugging Face and of Orbax."""
