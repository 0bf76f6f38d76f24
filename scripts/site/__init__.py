"""What the documentation site makes from the code; mkdocs.yml names it."""
