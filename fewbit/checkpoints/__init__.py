"""On-disk checkpoint formats, one file each, and the files that hold them."""
