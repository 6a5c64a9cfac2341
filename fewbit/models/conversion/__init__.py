"""From one checkpoint format to another."""
