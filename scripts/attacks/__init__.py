"""Parts of `python -m scripts.check attack`: what it attacks with, and how it sees what broke."""
