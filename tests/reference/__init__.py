"""The rules once more, in plain Python, owned by the tests: what the Lua is compared with."""
