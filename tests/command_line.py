"""The command line as a user sees it: what a command prints, and how it refuses."""

from typer.testing import CliRunner

from headwise.apps.cli.main import app


def run(*words: str, stdin: str | None = None) -> str:
    """The output of `headwise …`, which must succeed."""
    result = CliRunner().invoke(app, list(words), input=stdin, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def refused(*words: str) -> str:
    """The message with which `headwise …` refuses."""
    result = CliRunner().invoke(app, list(words))
    assert result.exit_code == 2, result.output
    return " ".join(result.output.replace("│", " ").split())
