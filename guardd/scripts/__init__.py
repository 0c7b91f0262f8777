"""Loads the Lua and binds it to typed stubs."""
