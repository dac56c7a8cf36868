"""What one CLI binary does, seen offline: it is run against a scripted provider before memory is entrusted to it."""
