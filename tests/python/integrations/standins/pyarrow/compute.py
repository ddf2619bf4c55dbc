"""See ../datasets."""
