"""SQL that any database takes: the schema, the statements, the forms of rows."""
