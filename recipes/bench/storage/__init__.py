"""The path to the SSD, the GPU's paths beside it, the malloc hook, and the links."""
