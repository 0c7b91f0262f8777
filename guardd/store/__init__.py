"""Connections to the store: embedded server, external server, fake."""
