"""The three levels on Model Runner V2, with all tokens on the device.

Rows have a fixed shape, so that the models' passes are CUDA graphs, and the host launches each
proposal's rounds without waiting for a token.
"""
