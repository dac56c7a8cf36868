"""What executes a turn: one contract, and one folder for each implementation."""
