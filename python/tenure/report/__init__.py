"""What recordings show: exports for other tools."""
