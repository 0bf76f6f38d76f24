"""Checkpoints on disk, of Hugging Face and of Orbax: directories, files, tensors in them."""
