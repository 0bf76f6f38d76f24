"""ExpertFlow's prefetch (docs/prescope.md, "ExpertFlow")."""
