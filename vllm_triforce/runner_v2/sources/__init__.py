"""The device sides of ``host/sources``, under the same names."""
