"""The three levels on Model Runner V2: tokens stay on the device, in the shapes of CUDA graphs."""
