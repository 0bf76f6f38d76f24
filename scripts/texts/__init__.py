"""Texts for training small language models: seeded, unlimited, free of licences."""
