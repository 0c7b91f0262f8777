import base64
import hashlib
import json
import unicodedata

from guardd.model.errors import EffectKeyMissing


def _n(v):
    if isinstance(v, str): return unicodedata.normalize("NFC", v).strip()
    if isinstance(v, bool) or v is None: return v
    if isinstance(v, float) and v == int(v): return int(v)
    if isinstance(v, dict): return {unicodedata.normalize("NFC", k): _n(x) for k, x in v.items()}
    if isinstance(v, (list, tuple)): return [_n(x) for x in v]
    return v
def normalise(a):
    if a is None or a == "": return {}
    if isinstance(a, str):
        try: a = json.loads(a)
        except ValueError: return _n(a)
    return _n(a)
def strip(v, vol):
    if isinstance(v, dict): return {k: strip(x, vol) for k, x in v.items() if x is not None and k not in vol}
    if isinstance(v, list): return [strip(x, vol) for x in v]
    return v
def canonical_json(v): return json.dumps(v, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
def fingerprint(t, c): return hashlib.sha256(f"{len(t)}:{t}{c}".encode()).hexdigest()
def short(f): return base64.urlsafe_b64encode(bytes.fromhex(f[:24])).decode()
def target(t, n, names): return short(fingerprint("t" + t, canonical_json([n.get(x) for x in names])))
def effect_key(n, names):
    for x in names:
        if not isinstance(n, dict) or n.get(x) is None: raise EffectKeyMissing("missing", field=x)
    return canonical_json([n[x] for x in names])
def record_digest(r, t, k): return hashlib.sha256(json.dumps([r, t, k]).encode()).hexdigest()[:40]
def provider_key(r, t, k): return "guardd-" + hashlib.sha256(json.dumps(["p", r, t, k]).encode()).hexdigest()[:32]
def state_digest(s): return hashlib.sha256(canonical_json(_n(s)).encode()).hexdigest()[:12]
def result_digest(b): return hashlib.sha256(b).hexdigest()
def load_json(t): return json.loads(t)
