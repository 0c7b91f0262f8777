"""Listens, parses, calls the engine, replies. No rule lives here."""
