"""Arguments that nobody should give, and every place to give them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch

import headwise as hw

Call = Callable[[], object]

q = torch.randn(2, 4, 5, 8)
k, v = torch.randn(2, 2, 2, 6, 8).unbind(0)

VALUES: dict[str, object] = {
    "None": None,
    "True": True,
    "zero": 0,
    "minus one": -1,
    "a half": 0.5,
    "nan": float("nan"),
    "inf": float("inf"),
    "10**30": 10**30,
    "1j": 1j,
    "a word": "x",
    "an empty word": "",
    "bytes": b"x",
    "an empty list": [],
    "a list": [1, 2],
    "a list of words": ["x", "y"],
    "a ragged list": [[1, 2], [3]],
    "a tuple": (0.5, None),
    "a dict": {"a": 1},
    "a set": {1, 2},
    "an object": object(),
    "a type": int,
    "a function": len,
    "a slice": slice(1, 2),
    "a mask": hw.mask.causal(),
    "a score": hw.Dot(),
    "a bias": hw.ALiBi(4),
    "an array": np.zeros(3),
    "an array of words": np.array(["x"]),
    "a NumPy integer": np.int64(3),
    "a scalar tensor": torch.tensor(0.5),
    "an empty tensor": torch.empty(0),
    "a vector": torch.ones(4),
    "integers": torch.arange(5),
    "booleans": torch.ones(2, 4, 5, 6, dtype=torch.bool),
    "complex": torch.ones(4, dtype=torch.complex64),
    "float8": torch.ones(2, 4, 5, 8).to(torch.float8_e4m3fn),
    "nothing but a shape": torch.ones(2, 4, 5, 8, device="meta"),
    "a sparse q": torch.ones(2, 4, 5, 8).to_sparse(),
    "sparse keys": torch.ones(2, 2, 6, 8).to_sparse(),
    "keys without data": torch.ones(2, 2, 6, 8, device="meta"),
    "one number per head, without data": torch.ones(4, device="meta"),
    "a sparse tensor": torch.eye(6).to_sparse(),
    "six axes": torch.ones(1, 1, 1, 1, 1, 1),
    "nan in a tensor": torch.full((5, 6), torch.nan),
}

OPTIONS = ("score", "mask", "bias", "softcap", "sinks")
CALLS: dict[str, tuple[Callable[..., object], tuple[str, ...]]] = {
    "attention": (hw.attention, (*OPTIONS, "dropout", "engine")),
    "observe": (
        hw.observe,
        (*OPTIONS, "dropout", "engine", "stats", "rows", "sink_keys"),
    ),
    "explain": (hw.explain, (*OPTIONS, "dropout", "engine", "observed")),
    "attention_map": (hw.attention_map, (*OPTIONS, "lse")),
    "partial": (hw.partial, (*OPTIONS, "dropout", "first_query", "first_key")),
}
AMAP = hw.attention_map(q, k, v)
READS: dict[str, Callable[[object], object]] = {
    "[x]": lambda x: AMAP[x],
    "[0, x]": lambda x: AMAP[0, x],
    "[0, 0, 0, x]": lambda x: AMAP[0, 0, 0, x],
    ".head(x, 0)": lambda x: AMAP.head(x, 0),
    ".pool(x)": lambda x: AMAP.pool(x),
    ".pool(2, x)": lambda x: AMAP.pool(2, x),
    ".top(x)": lambda x: AMAP.top(x),
    ".grid(x)": lambda x: AMAP.grid(x),
    ".tile(x, 0, 0)": lambda x: AMAP.head(0, 0).tile(x, 0, 0),
    ".tile(0, x, 0)": lambda x: AMAP.head(0, 0).tile(0, x, 0),
    "merge(x)": lambda x: hw.merge(hw.partial(q, k, v), x),
    "heads(x)": lambda x: hw.observe(q, k, v)[1].heads(x),
}
# each makes a keyword of hw.attention, which is then used: some garbage shows only there
PARTS: dict[str, Callable[[object], dict[str, object]]] = {
    "Dot": lambda x: {"score": hw.Dot(x)},
    "Additive": lambda x: {"score": hw.Additive(x)},
    "General": lambda x: {"score": hw.General(x)},
    "Cosine": lambda x: {"score": hw.Cosine(x)},
    "ALiBi": lambda x: {"bias": hw.ALiBi(x)},
    "RelativeBuckets": lambda x: {"bias": hw.RelativeBuckets(x)},
    "bidirectional": lambda x: {"bias": hw.RelativeBuckets(torch.ones(8, 4), x)},
    "max_distance": lambda x: {"bias": hw.RelativeBuckets(torch.ones(8, 4), True, x)},
    "Dropout": lambda x: {"dropout": hw.Dropout(x)},
    "seed": lambda x: {"dropout": hw.Dropout(0.5, x)},
    "causal": lambda x: {"mask": hw.mask.causal(x)},
    "window left": lambda x: {"mask": hw.mask.window(x)},
    "window right": lambda x: {"mask": hw.mask.window(1, x)},
    "window offset": lambda x: {"mask": hw.mask.window(1, 1, x)},
    "prefix": lambda x: {"mask": hw.mask.prefix(x)},
    "lengths": lambda x: {"mask": hw.mask.lengths(x)},
    "between first": lambda x: {"mask": hw.mask.between(x, torch.tensor(3))},
    "between last": lambda x: {"mask": hw.mask.between(torch.tensor(0), x)},
    "documents": lambda x: {"mask": hw.mask.documents(x)},
    "dense": lambda x: {"mask": hw.mask.dense(x)},
    "and": lambda x: {"mask": hw.mask.causal() & x},
    "or": lambda x: {"mask": x | hw.mask.causal()},
}


def calls() -> Iterator[tuple[str, Call]]:
    """Every garbage value in every place, by a name that says both."""
    for kind, x in VALUES.items():
        for name, (function, options) in CALLS.items():
            for place, given in (("q", (x, k, v)), ("k", (q, x, v)), ("v", (q, k, x))):
                yield f"{name}({place}={kind})", lambda f=function, given=given: f(*given)
            for option in options:
                more = {option: x}
                yield (
                    f"{name}({option}={kind})",
                    lambda f=function, more=more: f(q, k, v, **more),
                )
        for name, read in READS.items():
            yield f"{name} of {kind}", lambda read=read, x=x: read(x)
        for name, make in PARTS.items():
            for called, (function, _) in CALLS.items():
                if called != "attention_map" or name not in ("Dropout", "seed"):
                    yield (
                        f"{called} with {name} of {kind}",
                        lambda f=function, make=make, x=x: f(q, k, v, **make(x)),
                    )
