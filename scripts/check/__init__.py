"""Long runs that look for wrong results."""
