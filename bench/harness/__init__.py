"""What measures and reports; it knows nothing of what is measured."""
