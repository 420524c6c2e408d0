"""Maps that a run keeps: q, k and lse of a head in a safetensors file, and back again.

A map is a function of these three, the mask and the other terms of a logit, so the file holds them
too. Every weight read from it is the one that was seen.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from headwise.core.problem import Terms
from headwise.files import parsed_json, write_whole
from headwise.maps.attention_map import AttentionMap
from headwise.maps.region import Region
from headwise.watching.runs.parts import numbers_in

FOLDER = "maps"
NAME = re.compile(
    r"step-(?P<step>\d+)-layer-(?P<layer>\d+)-head-(?P<head>\d+)-rank(?P<rank>\d+)\.safetensors"
)


@dataclass(frozen=True, order=True)
class MapFile:
    """The step, layer, head and process of the map in a file."""

    step: int
    layer: int
    head: int
    rank: int = 0

    @classmethod
    def of(cls, name: str) -> MapFile | None:
        """Read a file's name; None for another file.

        >>> MapFile.of("step-00000100-layer-003-head-005-rank0.safetensors")
        MapFile(step=100, layer=3, head=5, rank=0)
        """
        found = numbers_in(name, NAME)
        return None if found is None else cls(**found)

    @property
    def name(self) -> str:
        """The name of its file."""
        place = f"layer-{self.layer:03d}-head-{self.head:03d}-rank{self.rank}"
        return f"step-{self.step:08d}-{place}.safetensors"


def maps_in(folder: Path) -> list[MapFile]:
    """The maps in a run's folder."""
    files = (folder / FOLDER).glob("*.safetensors")
    return sorted(kept for file in files if (kept := MapFile.of(file.name)) is not None)


def write_map(path: Path, amap: AttentionMap) -> None:
    """Write the map of one head, (1, 1, N, M)."""
    from safetensors.torch import save

    region = amap.region
    terms = region.terms._asdict()
    tensors = {"q": region.q, "k": region.k, "lse": amap.lse}
    tensors |= {name: x for name, x in terms.items() if isinstance(x, Tensor)}
    plain = {name: x for name, x in terms.items() if not isinstance(x, Tensor)}
    # Copies: safetensors refuses tensors that share memory, as a written-out call's q and k do.
    flat = {name: x.detach().cpu().contiguous().clone() for name, x in tensors.items()}
    write_whole(path, save(flat, metadata={"headwise": json.dumps(plain)}))


def read_map(path: Path) -> AttentionMap:
    """The map that `write_map` wrote; ValueError if the file is damaged."""
    try:
        amap = _map_in(path)
        amap[..., :1, :]  # a row shows that its tensors belong together
        amap[..., -1:, :]
    except OSError:
        raise
    except Exception as error:  # whatever damage does to a file, or to the shapes in it
        reason = str(error) or type(error).__name__
        raise ValueError(f"{path} is damaged: {reason:.200}; delete it") from error
    return amap


def _map_in(path: Path) -> AttentionMap:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        terms: dict[str, Any] = parsed_json((file.metadata() or {})["headwise"])
    q, k, lse = (tensors.pop(name) for name in ("q", "k", "lse"))
    if lse.shape != q.shape[:-1]:
        raise ValueError(f"lse has the shape {tuple(lse.shape)}, and q {tuple(q.shape)}")
    region = Region(q, k, k[..., :0], Terms(**{**terms, **tensors}))
    return AttentionMap.of(region, lse)
