"""Models: building them from a folder, loading quantized weights into them, and quantizing them block by block."""
