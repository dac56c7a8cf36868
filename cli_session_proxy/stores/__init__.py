"""Where chains are kept: one contract, and one folder for each implementation."""
