"""What is put away elsewhere, and comes back."""
