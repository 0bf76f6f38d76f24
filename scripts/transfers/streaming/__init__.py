"""What the commands about streamed experts share."""
