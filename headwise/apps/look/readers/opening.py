"""Finds and opens the model that `headwise look MODEL` names: built in, a folder, or on the hub."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from headwise import devices
from headwise.apps.look.readers.builtin import ImageReader, TextReader, TranslationReader
from headwise.apps.look.readers.image_text_reader import TransformersImageTextReader
from headwise.apps.look.readers.reader import Reader
from headwise.apps.look.readers.transformers_reader import (
    TransformersImageReader,
    TransformersTextReader,
    TransformersTranslationReader,
)
from headwise.apps.look.sparse_report import SparseReport
from headwise.apps.look.watched_folder import WatchedFolder
from headwise.files import json_object
from headwise.messages import say
from headwise.models.trained import (
    Classifier,
    LanguageModel,
    built_in,
    find_model,
    holds_trained_model,
    is_on_disk,
    load,
)
from headwise.watching import holds_run


def opened(what: str, device: str | None = None) -> Reader:
    """Open the model of this name or folder; ValueError says what is wrong.

    >>> opened("gpt").description
    Description(name='gpt', parameters=5573888, layers=6, heads=48, context=4096, device='cpu')
    """
    place = devices.chosen(device)
    if what not in built_in() and not holds_trained_model(Path(what)):
        if holds_run(Path(what)):
            raise ValueError(
                f"{what} is a watched run without its model: headwise look {what} shows it in the "
                f"browser, and headwise watch {what} in the terminal"
            )
        if report(what) is not None:
            raise ValueError(
                f"{what} is a report of headwise sparse: headwise look {what} shows it in the "
                f"browser, and --out page.html writes it as a file"
            )
        return opened_transformers(what, place, is_on_disk(what))
    loaded, name = load(what, place), Path(what).name
    if isinstance(loaded, LanguageModel):
        return TextReader(name, loaded)
    if isinstance(loaded, Classifier):
        return ImageReader(name, loaded)
    return TranslationReader(name, loaded)


def find(what: str) -> None:
    """ValueError if there is no such model, run or report, before anything is loaded."""
    if not holds_run(Path(what)) and report(what) is None:
        find_model(what)


def report(what: str) -> SparseReport | None:
    """The report of `headwise sparse` in this file; None if it is not a file of JSON."""
    path = Path(what)
    return SparseReport.read(path) if path.suffix == ".json" and path.is_file() else None


def watched(what: str) -> WatchedFolder | None:
    """The watched run in this folder; None if there is none."""
    folder = Path(what)
    return None if what in built_in() or not holds_run(folder) else WatchedFolder(folder)


def opened_transformers(what: str, device: torch.device, local: bool) -> Reader:
    """Load a transformers model by its folder or name on the hub; ValueError says what is wrong.

    Only safetensors are read, and no code that comes with the model is run. `local` means that it
    is on this machine, and that the hub is not asked.
    """
    try:
        import transformers
    except ModuleNotFoundError as missing:
        raise ValueError(
            f"{what} is read by transformers, which is not installed: pip install transformers"
        ) from missing
    auto: Any = transformers  # whose classes are partly untyped
    folder = Path(what) if Path(what).is_dir() else None
    here = {"local_files_only": local}
    talk = auto.utils.logging.get_verbosity()
    auto.utils.logging.set_verbosity_error()  # an unused output head is not worth a warning
    try:
        if folder is not None:
            _check_code(folder)
        config = auto.AutoConfig.from_pretrained(what, trust_remote_code=False, **here)
        _check_kernels(config)
        both, sees = bool(config.is_encoder_decoder), hasattr(config, "vision_config")
        kind = getattr(auto, _kind(config.architectures, both, sees))
        if folder is not None:
            _check_sizes(folder, config, kind)
        model = kind.from_pretrained(
            what, use_safetensors=True, dtype=torch.float32, trust_remote_code=False, **here
        )
        model = model.to(device).eval()
        if kind is auto.AutoModelForImageTextToText:
            given = auto.AutoProcessor.from_pretrained(what, trust_remote_code=False, **here)
        elif hasattr(config, "patch_size"):
            given = auto.AutoImageProcessor.from_pretrained(what, trust_remote_code=False, **here)
        else:
            given = auto.AutoTokenizer.from_pretrained(what, trust_remote_code=False, **here)
            _check_vocabulary(model, given)
    except Exception as error:  # of a damaged file, every class of transformers raises its own
        reason = " ".join(str(error).split()) or type(error).__name__
        if "trust_remote_code" in reason:
            reason = OWN_CODE
        said = say("transformers can't load {what}: {reason}", what=what, reason=reason)
        raise ValueError(said) from error
    finally:
        auto.utils.logging.set_verbosity(talk)
    name = Path(what).name
    if kind is auto.AutoModelForImageTextToText:
        return TransformersImageTextReader(name, model, given)
    if hasattr(config, "patch_size"):
        return TransformersImageReader(name, model.base_model, given, model)
    if both:
        return TransformersTranslationReader(name, model, given)
    return TransformersTextReader(name, model.base_model, given, model)


OWN_CODE = "the model comes with code of its own, which headwise does not run"


def _check_code(folder: Path) -> None:
    """ValueError if an index lists weights that are not safetensors: those would be pickles."""
    for path in sorted(folder.glob("*.safetensors.index.json")):
        listed = json_object(path.read_bytes(), path).get("weight_map")
        names = listed.values() if isinstance(listed, dict) else [listed]
        for name in names:
            if not isinstance(name, str) or not name.endswith(".safetensors") or "/" in name:
                raise ValueError(
                    f"{path} lists {name!r}, which is not a safetensors file beside it"
                )
    if (folder / "adapter_config.json").exists():
        raise ValueError(
            f"{folder / 'adapter_config.json'} makes it an adapter of another model; merge it first"
        )


def _check_kernels(config: Any) -> None:
    """ValueError if a configuration asks for a kernel of the hub, which is code."""
    written = config.to_dict()
    parts = [config, *(getattr(config, x, None) for x in getattr(config, "sub_configs", ()))]
    for part in parts:
        named = getattr(part, "_attn_implementation", None)
        if "/" in str(named) or "/" in str(written.get("attn_implementation")):
            raise ValueError(f"it asks for the attention kernel {named!r}; {OWN_CODE}")


def _check_sizes(folder: Path, config: Any, kind: Any) -> None:
    """ValueError if a model is far larger than its weights, before memory is taken for it."""
    from safetensors import safe_open

    tensors = values = 0
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as file:
                shapes = [file.get_slice(name).get_shape() for name in file.keys()]  # noqa: SIM118
        except Exception as error:  # safetensors raises its own
            raise ValueError(f"{path} is damaged: {error}; copy it again") from error
        tensors, values = tensors + len(shapes), values + sum(map(math.prod, shapes))
    if not tensors:
        raise ValueError("it has no safetensors, and headwise opens no pickles")
    _check_layers(config.to_dict(), tensors)
    with torch.device("meta"):
        made = kind.from_config(config, trust_remote_code=False)
    wanted = sum(each.numel() for each in made.parameters())
    if wanted > 2 * values + 10**6:  # an output layer may be missing
        raise ValueError(
            f"{folder / 'config.json'} describes {wanted:,} parameters, and the weights have "
            f"{values:,}; copy both again"
        )


def _check_layers(written: Any, tensors: int) -> None:
    """ValueError if a configuration has more layers than its weights have tensors."""
    if not isinstance(written, dict):
        return
    for name, value in written.items():
        _check_layers(value, tensors)
        if isinstance(value, int) and ("layer" in name or "depth" in name) and value > tensors:
            raise ValueError(f"config.json has {name}={value}, and the weights {tensors} tensors")


def _check_vocabulary(model: Any, tokeniser: Any) -> None:
    """ValueError if a tokeniser has ids that the model does not know."""
    known = model.get_input_embeddings().num_embeddings
    largest = max(tokeniser.get_vocab().values(), default=-1)
    if largest >= known:
        raise ValueError(
            f"its tokeniser has ids up to {largest}, and the model knows {known}; copy both again"
        )


def _kind(architectures: Sequence[str] | None, both: bool = False, sees: bool = False) -> str:
    """The class that loads a model with its output layer, if headwise reads its predictions.

    `both` is an encoder with a decoder, `sees` a model with a vision tower.

    >>> _kind(["BertForMaskedLM"]), _kind(["BertModel"]), _kind(["LlavaForConditionalGeneration"],
    ...     sees=True)
    ('AutoModelForMaskedLM', 'AutoModel', 'AutoModelForImageTextToText')
    """
    if both:
        return "AutoModelForSeq2SeqLM"
    names = architectures or ()
    if sees and any(name.endswith("ForConditionalGeneration") for name in names):
        return "AutoModelForImageTextToText"
    for output in ("ForCausalLM", "ForMaskedLM", "ForImageClassification"):
        if any(name.endswith(output) for name in names):
            return f"AutoModel{output}"
    return "AutoModel"
