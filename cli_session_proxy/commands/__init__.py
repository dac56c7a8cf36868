"""What the commands do; `cli` only parses and calls."""
