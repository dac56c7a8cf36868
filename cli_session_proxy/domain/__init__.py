"""The words and rules of the chain. Pure: no I/O, no clock, no store."""
