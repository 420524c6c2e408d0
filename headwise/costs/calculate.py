"""`hw.cost`: from a module, a model, a configuration, its file or a name to a cost."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from headwise.core.intervals import Mask
from headwise.costs.cost import Cost
from headwise.costs.tracing import building
from headwise.costs.tracing.building import check_depth
from headwise.costs.tracing.own_calls import OwnCall, own_call
from headwise.costs.tracing.traced_model import Given, TracedModel
from headwise.costs.visible import Tile
from headwise.costs.workload import (
    CacheLayout,
    DeviceKind,
    Layout,
    Ranks,
    Recompute,
    Workload,
    check_workload,
    dtype_name,
)
from headwise.hub import unreachable
from headwise.messages import say
from headwise.models.config import Config


def cost(
    what: Any,
    *,
    batch: int = 1,
    queries: int | None = None,
    keys: int | None = None,
    context: int | None = None,
    mask: Mask | None = None,
    dtype: object = "bf16",
    mesh: object = None,
    fused: bool = True,
    recompute: Recompute = None,
    cache: object = None,
    device: DeviceKind = "cuda",
    tile: Tile = (128, 128),
    layout: Layout = "contiguous",
    inputs: Any = None,
) -> Cost:
    """Everything that a forward and a backward take, before they run, as exact counts.

    `what` is a module or model of headwise, a Transformer module of PyTorch, a model or config of
    transformers, a config as a dictionary or a config.json, or a model's name. Any other module is
    counted for its `inputs`: a tensor, a tuple of arguments, or a dictionary of them.

    `queries` tokens per sequence run (4,096, or fewer if it has fewer positions); `keys` counts all
    tokens of a sequence, so more keys than queries means that the others are in a cache. `context`
    is the length of the sequence that cross-attention sees. `mask` narrows the architecture's own.
    `mesh`, such as {"dp": 8, "tp": 4}, divides the work; the result is that of the busiest rank.

    For bytes saved: `fused` attention or step by step, `recompute` "layers" or "attention", and the
    kind of `device`, "cuda" or "cpu", whose kernels save different things. `cache` is a dtype or a
    `hw.CacheLayout`; `tile` are the queries and keys that a kernel computes together; `layout`,
    "contiguous" or "head_tail", says how context parallelism divides a sequence.

    >>> import headwise as hw
    >>> attn = hw.nn.MultiHeadAttention(64, 4, mask=hw.mask.causal())
    >>> taken = hw.cost(attn, batch=2, queries=128)
    >>> taken.params == 4 * 64**2 + 4 * 64
    True
    >>> taken.flops == 8 * 2 * 128 * 64**2 + 4 * 2 * (128 * 129 // 2) * 64
    True
    """
    name = dtype_name("dtype", dtype)
    work = Workload(
        batch,
        queries,
        keys,
        context,
        mask,
        name,
        device,
        fused,
        recompute,
        tile,
        CacheLayout.of(cache, name),
        Ranks.of(mesh),
        layout,
    )
    check_workload(work)
    return read_architecture(what, context, inputs).cost(work)


def unwrapped(module: nn.Module) -> nn.Module:
    """The module inside torch.compile, DataParallel and DistributedDataParallel."""
    for name in ("_orig_mod", "module"):
        inside = getattr(module, name, None)
        if isinstance(inside, nn.Module):
            return unwrapped(inside)
    return module


def read_architecture(what: Any, context: int | None = None, inputs: Any = None) -> TracedModel:
    """The architecture of anything that `cost` takes."""
    if isinstance(what, nn.Module):
        return _read_module(unwrapped(what), context, inputs)
    found = what if isinstance(what, TracedModel) else _described(what)
    if inputs is not None:
        found.give(_given(inputs))
    return found


def _described(what: Any) -> TracedModel:
    """The architecture of a configuration or a name."""
    if isinstance(what, Config):
        model = building.build_own(what)
        return TracedModel(type(model).__name__, model, own=OwnCall(model, False))
    if isinstance(what, Mapping):
        return read_fields(what)
    if isinstance(what, str | Path):
        return read_name(str(what))
    if is_configuration(what):
        return read_configuration(what)
    raise ValueError(
        f"{what!r} has no cost; give a module, a model, a configuration (an object, a dictionary "
        "or a config.json), or a model's name"
    )


def _read_module(module: nn.Module, context: int | None, inputs: Any) -> TracedModel:
    """A module that is called with these inputs, or with those of its kind."""
    name = type(module).__name__
    if inputs is not None:
        return TracedModel(name, building.on_meta(module), _given(inputs))
    own = own_call(module, context)
    if own is None and not is_configuration(getattr(module, "config", None)):
        raise ValueError(
            f"{name} can't be read: hw.cost takes modules of headwise, PyTorch's Transformer "
            "layers and models of transformers; for any other module give tensors as inputs="
        )
    made = building.on_meta(module)
    return TracedModel(name, made, own=None if own is None else OwnCall(made, own.crosses))


def _given(inputs: Any) -> Given:
    """Arguments of a forward, without their numbers."""
    if isinstance(inputs, Mapping):
        return (), {name: building.without_numbers(x) for name, x in inputs.items()}
    if isinstance(inputs, Tensor) or not isinstance(inputs, Sequence):
        inputs = (inputs,)
    return tuple(building.without_numbers(x) for x in inputs), {}


def read_fields(given: Mapping[str, Any]) -> TracedModel:
    """The model of a configuration's fields, by its `model_type` and `architectures`."""
    kind = given.get("model_type")
    if kind is None:
        raise ValueError(
            say("the configuration has no field 'model_type', which says which architecture it is")
        )
    check_depth(given)
    try:
        from transformers import AutoConfig
    except ImportError:
        raise ValueError(
            say("counting a configuration of {kind!r} builds its model, which needs transformers: "
                "pip install headwise[transformers]", kind=kind)
        ) from None  # fmt: skip
    fields = {name: value for name, value in given.items() if name != "model_type"}
    try:
        config = AutoConfig.for_model(kind, **fields)
    except Exception as error:  # each class has checks of its own
        message = " ".join(str(error).split())[:300]
        raise ValueError(
            say("transformers refuses this configuration of {kind!r}: {message}", kind=kind,
                message=message)
        ) from None  # fmt: skip
    return read_configuration(config)


def is_configuration(what: object) -> bool:
    """True for a config object of transformers."""
    return callable(getattr(what, "to_dict", None)) and hasattr(what, "model_type")


def read_configuration(config: Any) -> TracedModel:
    """The model that transformers builds of a config object."""
    check_depth({**config.to_dict(), "model_type": config.model_type})
    model = building.build(config)
    named = getattr(config, "architectures", None)
    return TracedModel(named[0] if named else config.model_type, model)


def read_name(name: str) -> TracedModel:
    """The model of a config.json, of a folder with one, or of a name.

    A name is looked up in the local cache of the hub, then on the hub.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        path = path / "config.json"
    if path.is_file():
        return read_fields(_from_file(path))
    try:
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError
        from transformers import AutoConfig
    except ImportError:
        raise ValueError(
            say(
                "{name!r} is not a file, and finding a model by its name needs transformers: "
                "pip install headwise[transformers]",
                name=name,
            )
        ) from None
    try:
        found = try_to_load_from_cache(name, "config.json")
    except HFValidationError:
        raise ValueError(
            say("{name!r} is neither a config.json nor a model's name", name=name)
        ) from None
    if isinstance(found, str):
        return read_fields(_from_file(Path(found)))
    reason = unreachable()
    if reason:
        raise ValueError(
            say(
                "{name!r} is neither a config.json nor in the local cache, and the hub can't be "
                "asked for it ({reason})",
                name=name,
                reason=reason,
            )
        )
    try:
        return read_configuration(AutoConfig.from_pretrained(name, trust_remote_code=False))
    except OSError as error:
        raise ValueError(
            say("{name!r} is not on the hub: {reason}", name=name,
                reason=str(error).splitlines()[0])
        ) from None  # fmt: skip


def _from_file(path: Path) -> dict[str, Any]:
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(say("{path} is not JSON: {reason}", path=path, reason=error)) from None
    if not isinstance(fields, dict):
        raise ValueError(
            say("{path} holds no configuration, but a {kind}", path=path,
                kind=type(fields).__name__)
        )  # fmt: skip
    return fields
