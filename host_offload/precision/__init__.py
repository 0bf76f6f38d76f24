"""Every expert always resident, in one of several versions, and the way from one to another."""
