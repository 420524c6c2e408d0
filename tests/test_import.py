"""Importing headwise with nothing but torch installed."""

import importlib.metadata
import subprocess
import sys

import pytest

import headwise

OPTIONAL = (
    "typer",
    "rich",
    "triton",
    "transformers",
    "tokenizers",
    "safetensors",
    "sacrebleu",
    "PIL",
    "starlette",
    "uvicorn",
    "matplotlib",
    "anywidget",
    "pyarrow",
    "pandas",
)


def python(code: str) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh interpreter with warnings as errors."""
    command = [sys.executable, "-W", "error", "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_importing_headwise_needs_nothing_optional() -> None:
    # Made unimportable, not searched in sys.modules: torch itself loads triton if it is there.
    # A torch built for CUDA prints that triton is missing, and continues.
    hidden = f"import sys; sys.modules |= dict.fromkeys({OPTIONAL}); import headwise"
    said = python(hidden).stderr.splitlines()
    assert [line for line in said if "triton not found" not in line] == []


def test_the_version_is_that_of_the_package() -> None:
    assert headwise.__version__ == importlib.metadata.version("headwise")


def test_the_command_line_without_its_extra_says_what_to_install() -> None:
    refused = python("import sys; sys.modules['typer'] = None; import headwise.apps.cli.main")
    assert refused.returncode == 1
    assert refused.stderr == "The command line needs typer: pip install 'headwise[cli]'\n"


def test_importing_headwise_does_not_import_the_compiler() -> None:
    assert python("import sys, headwise; assert 'torch._dynamo' not in sys.modules").stderr == ""


def test_a_name_is_loaded_when_it_is_first_asked_for() -> None:
    counted = """
import sys
import torch, headwise as hw
q = torch.zeros(1, 2, 5, 4)
hw.attention(q, q, q, mask=hw.mask.causal())
ours = [name for name in sys.modules if name.partition(".")[0] == "headwise"]
assert len(ours) <= 80, len(ours)
assert not any(part in name for name in ours for part in ("apps", "watching", "costs", "nn"))
"""
    assert python(counted).stderr == ""


def test_every_public_name_is_there_and_is_listed() -> None:
    assert set(headwise.__all__) <= set(dir(headwise))
    assert all(getattr(headwise, name) is not None for name in headwise.__all__)
    with pytest.raises(AttributeError, match="module 'headwise' has no attribute 'atention'"):
        headwise.atention  # noqa: B018


def test_names_are_loaded_in_code_that_is_being_compiled() -> None:
    compiled = """
import torch, headwise as hw
@torch.compile(fullgraph=True, backend="eager")
def attend(q):
    return hw.attention(q, q, q, mask=hw.mask.causal()), hw.nn.GELU
attend(torch.zeros(1, 2, 5, 4))
"""
    assert python(compiled).stderr == ""


def test_operators_and_their_flops_are_known_without_a_call() -> None:
    registered = """
import torch, headwise
from torch.utils.flop_counter import flop_registry
ours = [x for x in flop_registry if "headwise" in str(x)]
assert ours, flop_registry
"""
    assert python(registered).stderr == ""


def test_the_help_of_the_command_needs_no_torch() -> None:
    helped = """
import sys
sys.argv = ["bin/headwise"]
import headwise.apps.cli.main
assert "torch" not in sys.modules
import headwise
assert headwise.attention.__module__ == "headwise.api"
"""
    assert python(helped).stderr == ""
