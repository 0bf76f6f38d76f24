"""What the command about two processors measures where."""
