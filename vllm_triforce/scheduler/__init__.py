"""What the engine's scheduler has to know of TriForce."""
