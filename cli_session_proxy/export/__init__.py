"""An agent's chain in forms that a program or a person can read."""
