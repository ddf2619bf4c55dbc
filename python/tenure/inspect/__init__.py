"""Who holds every byte, in any PyTorch program: watching, verdicts, recordings."""
