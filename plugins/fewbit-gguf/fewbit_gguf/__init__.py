"""GGUF files for fewbit: a checkpoint format and an opener, which fewbit finds through entry points."""
