"""Level 1's sources on the device, under the names of ``runner_v1/sources``."""
