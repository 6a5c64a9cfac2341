"""Bit layouts as inverse pairs, one file each."""
