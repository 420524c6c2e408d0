"""Importing headwise with nothing but torch installed."""

import importlib.metadata
import subprocess
import sys

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
    refused = python("import sys; sys.modules['typer'] = None; import headwise.cli.main")
    assert refused.returncode == 1
    assert refused.stderr == "The command line needs typer: pip install 'headwise[cli]'\n"


def test_importing_headwise_does_not_import_the_compiler() -> None:
    assert python("import sys, headwise; assert 'torch._dynamo' not in sys.modules").stderr == ""
