"""Runs work outside the event loop: see `pool`."""
