import re

from guardd.model.errors import BadArgument

_SEG = re.compile(r"[A-Za-z0-9._:-]{1,64}")
def check_run(path):
    if not isinstance(path, str) or len(path) > 384 or not all(_SEG.fullmatch(s) for s in path.split("/")):
        raise BadArgument("bad run", field="run", value=path)
    return path
def check_call_id(v, field="call"):
    if not isinstance(v, str) or not re.fullmatch(r"[\x21-\x7e]{1,128}", v):
        raise BadArgument("bad id", field=field, value=v)
def check_name(field, v):
    if not isinstance(v, str) or len(v.encode()) > 255 or (not v and field != "agent"):
        raise BadArgument("bad name", field=field, value=v)
def check_reason(v):
    if not re.fullmatch(r"[A-Za-z0-9._:-]{1,64}", v):
        raise BadArgument("bad reason", field="reason", value=v)
def parents(p):
    s = p.split("/")
    return tuple("/".join(s[:i]) for i in range(1, len(s)))
def root(p): return p.partition("/")[0]
