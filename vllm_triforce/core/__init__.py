"""What both runners share of the way of a token."""
