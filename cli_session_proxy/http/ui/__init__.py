"""The page at `/ui`: static files that hold no data (`static/`), and what they ask for."""
