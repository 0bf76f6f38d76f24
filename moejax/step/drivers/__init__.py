"""The ways through a step's layers: one executable, from Python, or as experts come."""
