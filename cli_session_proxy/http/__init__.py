"""The HTTP door: server, routes of every wire, keys, metrics and the page. No logic of continuity lives here."""
