"""`tenure store`: what the processes of a job have stored, and a keeper for those that end.

Beside the package, for that imports torch, which takes seconds.
"""

from __future__ import annotations

from typing import Annotated

import typer

store = typer.Typer(
    help="The store: which process has which tensors, for whom, and since when.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Job = Annotated[
    str | None,
    typer.Option(help="Of which job.", show_default="TENURE_STORE_JOB, else every job here"),
]
AsJson = Annotated[bool, typer.Option("--json", help="For machines: one JSON object.")]


@store.command("ls")
def list_objects(
    job: Job = None,
    scope: Annotated[str | None, typer.Option(help="Only of this: 'step 168'.")] = None,
    most: Annotated[int, typer.Option(min=1, help="Most objects shown.")] = 50,
    json: AsJson = False,
) -> None:
    """List what the processes of this host and user have stored, the largest first.

    Each line says how large an object is, whose, in which scope, where it was put, and who has yet
    to fetch it.

      tenure store ls --scope 'step 168'
    """
    from tenure.store import listing

    raise typer.Exit(listing.show_objects(job, scope, most, json=json))


@store.command()
def stats(job: Job = None, json: AsJson = False) -> None:
    """Show for each process what it holds, served and refused, and who still maps what it freed.

    tenure store stats --job my-run
    """
    from tenure.store import listing

    raise typer.Exit(listing.show_stats(job, json=json))


@store.command()
def serve(
    job: Annotated[str | None, typer.Option(help="Of which job.", show_default="default")] = None,
    cap: Annotated[str, typer.Option(help="Most memory: 8GiB.")] = "",
    spill: Annotated[
        str, typer.Option(metavar="FOLDER", help="When it is full, move objects to disk, here.")
    ] = "",
    listen: Annotated[
        str,
        typer.Option(
            help="Where other hosts come in; needs TENURE_STORE_SECRET_FILE.",
            show_default="TENURE_STORE_LISTEN, or 127.0.0.1:0",
        ),
    ] = "",
) -> None:
    """Keep tensors for processes that end: a keeper, one for each job and host.

    It takes what others put with `keeper=True` and serves it until it was fetched or its scope is
    closed, or until Ctrl-C.

      tenure store serve --job my-run --cap 8GiB --spill /scratch
    """
    from tenure.store import listing

    raise typer.Exit(listing.keep(job, cap, spill, listen))
