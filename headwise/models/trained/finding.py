"""What the name of a model means: built in, a folder, or on the hub."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path

from headwise.files import json_object
from headwise.hub import unreachable
from headwise.models.trained.loading import built_in


def find_model(what: str) -> None:
    """ValueError if there is no such model, before anything is loaded."""
    folder = Path(what)
    if what in built_in():
        return
    if not folder.is_dir():
        is_on_disk(what)
    elif not (folder / "config.json").is_file():
        raise ValueError(
            f"{what} holds no model: it has no config.json, as a run of headwise train or a model "
            "of transformers has"
        )


def holds_trained_model(folder: Path) -> bool:
    """True if a folder is a run of `headwise train`."""
    try:
        return "task" in json_object((folder / "config.json").read_bytes(), folder)
    except (OSError, ValueError):
        return False


def is_on_disk(what: str) -> bool:
    """True if a transformers model is on this machine; ValueError if the hub can't be asked.

    >>> is_on_disk("gtp")
    Traceback (most recent call last):
    ValueError: there is no model 'gtp'; did you mean gpt? For a model on the hub, give owner/gtp
    """
    if Path(what).is_dir():
        return True
    meant = get_close_matches(what.lower(), built_in(), 1)
    if meant and what.isalpha():  # gpt2 is a model of the hub
        said = f"there is no model {what!r}; did you mean {meant[0]}?"
        raise ValueError(f"{said} For a model on the hub, give owner/{what}")
    try:
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError
    except ModuleNotFoundError as missing:
        reason = "a name on the hub needs transformers: pip install transformers"
        raise _missing(what, reason) from missing
    try:
        if isinstance(try_to_load_from_cache(what, "config.json"), str):
            return True
    except HFValidationError as error:
        raise _missing(what, "it is not a name on the hub either") from error
    _reach_hub(what)
    return False


def _reach_hub(what: str) -> None:
    """ValueError if the hub is out of reach."""
    reason = unreachable()
    if reason:
        raise _missing(what, f"the hub can't be asked for it ({reason})")


def _missing(what: str, reason: str) -> ValueError:
    return ValueError(
        f"there is no model {what!r}: it is not a folder here, and {reason}. The built-in models "
        "are gpt and translate"
    )
