"""What is PostgreSQL's own: the pool, its transactions, its clock, what its errors mean."""
