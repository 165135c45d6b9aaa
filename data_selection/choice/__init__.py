"""Which rows are kept, given what they score."""
