"""Times of one thing at a time, each beside its floor."""
