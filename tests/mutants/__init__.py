"""Rules broken on purpose: each must be noticed by a test."""
