"""One request from acceptance to acknowledgement, and what a crash leaves of it."""
