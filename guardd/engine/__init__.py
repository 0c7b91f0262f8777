"""One async method per operation: canonicalise, call the script, build the answer."""
