"""Work that must not hold the event loop, done beside it: see `pool`."""
