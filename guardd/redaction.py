def redact(v, *, key, names=frozenset()): return v
def shorten(t, bytes_max=2048): return t[:bytes_max], len(t) > bytes_max
