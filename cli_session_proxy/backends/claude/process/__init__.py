"""CLI processes: how one is started, driven and ended, and how many there may be."""
