"""The `tenure` command.

Each command's work is in a module of its own, imported when the command runs.
"""

from __future__ import annotations

from typing import Annotated

import typer

app = typer.Typer(
    name="tenure",
    help="Who holds each byte of a PyTorch program, since when, and proof that memory stays flat.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # errors stay one line that can be searched for in a log
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        from tenure._build import VERSION

        typer.echo(f"tenure {VERSION}")
        raise typer.Exit


@app.callback()
def _tenure(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    pass


@app.command()
def info(
    json: Annotated[bool, typer.Option("--json", help="For machines: one JSON object.")] = False,
) -> None:
    """Show versions, devices, parts and limits, for a bug report."""
    from tenure import info as command

    sections = command.collect()
    if json:
        command.print_json(sections)
    else:
        command.print_text(sections)


@app.command()
def demo(
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps to train.")] = 150,
    seed: Annotated[int, typer.Option(min=0, help="Of weights and batches.")] = 0,
    device: Annotated[str, typer.Option(help="Where to train: cpu, cuda, cuda:1 …")] = "cpu",
) -> None:
    """Train a small model and show who held its memory."""
    from tenure import demo as command

    try:
        place = command.usable_device(device)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--device") from None
    command.run(command.Options(steps, seed, place))


def main() -> None:
    """Runs the command line: the entry point of `tenure` and of `python -m tenure`."""
    app()
