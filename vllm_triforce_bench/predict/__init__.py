"""Model of the time of a decoding step, from bytes, arithmetic and launches (docs/doctor.md)."""
