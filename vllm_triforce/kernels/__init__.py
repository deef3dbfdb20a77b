"""Triton kernels of the device-resident loop; tests/kernels holds a readable oracle for each."""
