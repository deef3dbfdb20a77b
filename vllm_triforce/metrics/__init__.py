"""What is counted, and its way to /metrics and the log."""
