import re

from guardd.model.errors import ERRORS


class Store:
    def __init__(self, redis): self.r = redis
    async def execute(self, *cmds):
        p = self.r.pipeline(transaction=False)
        for c in cmds: p.execute_command(*c)
        return await p.execute(raise_on_error=False)
    transaction = execute
    async def script(self, src, keys, args, *, before=(), after=()):
        if before: await self.execute(*before)
        try:
            r = await self.r.eval(src.text, len(keys), *keys, *args)
        except Exception as e:
            m = re.search(r"GUARD_(\w+) (.*)", str(e))
            if m: raise ERRORS[m[1].lower()](m[2])
            raise
        if after: await self.execute(*after)
        return r
