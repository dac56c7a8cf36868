"""What is SQLite's own: the file, its journal, its writer, its errors, its copies."""
