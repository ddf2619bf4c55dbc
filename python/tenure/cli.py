"""The `tenure` command.

Each command's work is in a module of its own, imported when the command runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tenure.store_command import store
from tenure.training.command import SETTINGS, TrainCommand, train

if TYPE_CHECKING:
    from tenure.inspect.recordings import Found
    from tenure.report.diff import Run

Level = Enum("Level", {"count": "count", "trace": "trace", "deep": "deep"})
ExportForm = Enum("ExportForm", {"csv": "csv", "trace": "trace", "snapshot": "snapshot"})
TopSort = Enum(
    "TopSort", {"rank": "rank", "memory": "memory", "headroom": "headroom", "growth": "growth"}
)
EnvStyle = Enum("EnvStyle", {"shell": "shell", "json": "json", "yaml": "yaml"})


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
    seed: Annotated[int, typer.Option(min=0, max=2**64 - 1, help="Of weights and batches.")] = 0,
    device: Annotated[str, typer.Option(help="Where to train: cpu, cuda, cuda:1 …")] = "cpu",
) -> None:
    """Train a small model and show who held its memory."""
    from tenure import demo as command

    try:
        place = command.usable_device(device)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--device") from None
    command.run(command.Options(steps, seed, place))


_OUT = Annotated[str, typer.Option("--out", help="Folder for recordings, one file a process.")]
_LEVEL = Annotated[
    Level | None,
    typer.Option(
        help="count: bytes only; trace: each storage; deep: whole stacks.", show_default="trace"
    ),
]
_RANKS = Annotated[
    str,
    typer.Option(
        help="Ranks watched at --level, the others being counted: 0,8-15 or all. Without it, of "
        "more than 16 ranks one a stage and role is, and those that grow more than their peers.",
        show_default=False,
    ),
]
_REDACT = Annotated[
    bool, typer.Option("--redact", help="Hash paths and names in the files that are written.")
]
_LOCAL = Annotated[
    str,
    typer.Option(
        help="Record there and copy to --out at the end; by itself where --out is on a network.",
        show_default=False,
    ),
]
_RECORDINGS = Annotated[
    list[str], typer.Argument(help="A folder that `tenure run` made, or files.")
]


@app.command(
    context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True},
)
def run(
    program: Annotated[
        list[str] | None,
        typer.Argument(metavar="[--] SCRIPT.py|-m MODULE|COMMAND …", help="What to run."),
    ] = None,
    out: _OUT = "run.tenure",
    json: Annotated[str, typer.Option("--json", help="File for the verdict at the end.")] = "",
    level: _LEVEL = None,
    ranks: _RANKS = "",
    quiet: Annotated[bool, typer.Option("--quiet", help="Say nothing on stderr.")] = False,
    redact: _REDACT = False,
    local_dir: _LOCAL = "",
    max_cost: Annotated[
        float, typer.Option(min=0, help="Percent of the time; above it bytes are only counted.")
    ] = 20.0,
    max_memory: Annotated[
        str, typer.Option(help="Memory for watching; above it bytes are only counted.")
    ] = "512MiB",
    agent: Annotated[
        bool, typer.Option("--agent", help="Do not watch: only make `tenure attach` possible.")
    ] = False,
) -> None:
    """Watch a PyTorch program and its children: who holds what grows.

    The program is not edited and keeps its output, signals and exit status. The verdict comes on
    stderr as soon as it is known and again at the end.

      tenure run train.py --epochs 3

      torchrun --nproc-per-node 2 -m tenure run train.py

      tenure run -- accelerate launch train.py
    """
    from tenure._inputs import parse_bytes
    from tenure.inspect import launch
    from tenure.inspect.options import Options

    with _one_line_errors():
        if agent:
            launch.run_idle(program or [], quiet=quiet)
        options = Options(
            out,
            json,
            level.value if level else "trace",
            ranks=ranks or ("all" if level else ""),
            quiet=quiet,
            cost=max_cost,
            memory=parse_bytes(max_memory),
            redact=launch.new_key() if redact else "",
            local=local_dir,
        )
        launch.run(program or [], options)


@app.command()
def env(
    out: _OUT = "run.tenure",
    level: _LEVEL = None,
    ranks: _RANKS = "",
    redact: _REDACT = False,
    local_dir: _LOCAL = "",
    style: Annotated[
        EnvStyle, typer.Option("--as", help="shell: exports; json: Ray's runtime_env; yaml: a pod.")
    ] = EnvStyle["shell"],
    agent: Annotated[
        bool, typer.Option("--agent", help="Do not watch: only make `tenure attach` possible.")
    ] = False,
) -> None:
    """Print the variables that make any Python process be watched, for launchers of your own.

    eval "$(tenure env)" && srun python train.py
    """
    from tenure.inspect import launch
    from tenure.inspect.options import Options

    with _one_line_errors():
        if agent:
            typer.echo(launch.idle_exports(style.value))
            return
        options = Options(
            out,
            level=level.value if level else "trace",
            ranks=ranks or ("all" if level else ""),
            redact=launch.new_key() if redact else "",
            local=local_dir,
        )
        typer.echo(launch.exports(options, style.value))


@app.command()
def attach(
    pid: Annotated[
        str, typer.Argument(metavar="PID", help="The process; without it, those with an agent.")
    ] = "",
    once: Annotated[
        bool, typer.Option("--once", help="One look: who holds what is alive now. Then leave.")
    ] = False,
    seconds: Annotated[
        float, typer.Option("--for", min=0, help="Seconds to watch.", show_default="until Ctrl-C")
    ] = 0.0,
    steps: Annotated[
        int, typer.Option("--steps", min=0, help="Steps to watch.", show_default="until Ctrl-C")
    ] = 0,
    out: Annotated[
        str, typer.Option("--out", help="Folder for a recording.", show_default="none")
    ] = "",
    json: Annotated[str, typer.Option("--json", help="File for what was found.")] = "",
    level: _LEVEL = Level["trace"],
    redact: _REDACT = False,
    max_pause: Annotated[
        float, typer.Option(min=0, help="Seconds that the program may stand still for a look.")
    ] = 10.0,
    timeout: Annotated[
        float, typer.Option(min=0.1, help="Seconds to wait for a moment to look in.")
    ] = 15.0,
) -> None:
    """Watch a process that is running, started with the idle agent; or take one look at it.

    The agent is a thread that waits at a socket which only your user may use. Attaching says how
    long the program will stand still and what cannot be known, and then turns watching on; leaving
    turns it off. No debugger is involved.

      tenure run --agent train.py            # or: eval "$(tenure env --agent)"

      tenure attach 4242 --once              # who holds what is alive now

      tenure attach 4242 --steps 100         # does it grow? who holds what grows?

    Exits with 0 flat, or a look was taken; 1 leak or growth; 2 bad input or no answer; 3 too short.
    """
    from tenure.errors import InputError
    from tenure.inspect import attach as command
    from tenure.inspect.launch import new_key
    from tenure.inspect.options import Options

    key = new_key() if redact else ""
    options = Options(out, level=level.value if level else "trace", redact=key, ranks="all")
    request = command.Request(pid, options, json, seconds, steps, max_pause, timeout)
    with _one_line_errors():
        if once and (out or seconds or steps):
            raise InputError("--once takes one look and leaves: without --out, --for and --steps")
        try:
            code = command.once(request) if once else command.watch(request)
        except KeyboardInterrupt:
            raise typer.Exit(130) from None
    raise typer.Exit(code)


@app.command()
def why(
    recordings: Annotated[str, typer.Argument(help="A folder that `tenure run` made, or a file.")],
    storage: Annotated[
        int | None, typer.Argument(help="Id of a storage; default: suspects.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="For machines: the verdict.")] = False,
) -> None:
    """Show who held what grew: retention paths from recordings."""
    from tenure.inspect import recordings as reading
    from tenure.inspect import why as command

    with _one_line_errors():
        found = _say_what_is_left_out([recordings])
        if storage is not None:
            typer.echo(_plain(command.why_one(found, storage)))
            return
        with _progress() as progress:
            verdict = reading.judge(found, progress)
        typer.echo(_as_json(verdict) if json else _plain(command.why_all(verdict)))


@app.command()
def check(
    recordings: _RECORDINGS,
    peak: Annotated[str, typer.Option(help="Most bytes a process may reach: 12GiB.")] = "",
    baseline: Annotated[
        str, typer.Option(help="A run that was good: fail if this one is worse.")
    ] = "",
    tolerance: Annotated[
        float, typer.Option(min=0, help="Percent by which the peak may exceed the baseline's.")
    ] = 5.0,
    json: Annotated[bool, typer.Option("--json", help="For machines: the verdict.")] = False,
) -> None:
    """Pass or fail a run, for CI.

    Exits with 0 flat, 1 leak, growth or peak over, 2 bad input, 3 too short.

      tenure check run.tenure --peak 12GiB --baseline main.tenure
    """
    from tenure._inputs import parse_bytes
    from tenure.inspect import recordings as reading
    from tenure.inspect import verdicts
    from tenure.inspect import why as command

    with _one_line_errors():
        limit = parse_bytes(peak) if peak else None
        found = _say_what_is_left_out(recordings)
        with _progress() as progress:
            verdict = reading.judge(found, progress)
        typer.echo(_as_json(verdict) if json else _plain(verdicts.first_screen(verdict)))
        code = command.CODES[verdict["verdict"]]
        if limit is not None:
            reached, rank = reading.peak_of(found)
            if reached > limit:
                over = f"peak {reached:,} bytes on rank {rank}, over {limit:,}"
                typer.echo(_plain(over), err=json)
                code = 1
        if baseline:
            from tenure.report import diff

            good = _run_of(baseline)
            this = diff.run_of(found, "", verdict)
            worse = diff.over_baseline(good, this, tolerance)
            if worse:
                typer.echo(_plain(worse), err=json)
                code = 1
    raise typer.Exit(code)


@app.command()
def report(
    recordings: _RECORDINGS,
    out: Annotated[str, typer.Option("--out", help="File to write.")] = "tenure-report.html",
) -> None:
    """Make one page of all ranks: the verdict, who holds what grows, the peak, every storage.

    The file needs no network and nothing else: open it, send it, keep it with a CI run.

    Of a job that died, the rank that began it, the allocation that failed and what held the memory
    come first, on the screen.

      tenure report run.tenure --out leak.html
    """
    from tenure.inspect.verdicts import shown_path
    from tenure.report import flights
    from tenure.report import html as command

    with _one_line_errors():
        left = flights.find(recordings)
        if left:
            typer.echo(_plain(flights.screen(left)))
        if left and not _has_recordings(recordings):
            made = flights.page(left, out, ", ".join(map(shown_path, recordings)))
            typer.echo(_plain(f"written to {shown_path(made)}"))
            return
        found = _say_what_is_left_out(recordings)
        with _progress() as progress:
            made = command.report(found, out, progress, ", ".join(map(shown_path, recordings)))
        size = f" ({made.stat().st_size / 1e6:.1f} MB)" if made.is_file() else ""
        typer.echo(_plain(f"written to {shown_path(made)}{size}"))


@app.command()
def dump(
    folder: Annotated[str, typer.Argument(help="The folder of a job that runs.")] = "run.tenure",
    timeout: Annotated[
        float, typer.Option(min=0.1, help="Seconds to wait for the ranks' snapshots.")
    ] = 30.0,
) -> None:
    """Ask all ranks of a live job for their snapshots now; the job goes on.

    tenure dump run.tenure && tenure report run.tenure

    Exits with 0 all ranks answered, 1 some did not in time, 2 no live job.
    """
    from tenure.inspect.verdicts import shown_path
    from tenure.telemetry import asking as command

    with _one_line_errors(), _progress("snapshots") as progress:
        answers = command.ask(folder, timeout, progress)
    for path in answers.files:
        typer.echo(_plain(shown_path(path)))
    if answers.missing:
        ranks = ", ".join(map(str, answers.missing))
        typer.echo(f"tenure: no snapshot within {timeout:g} s: rank {ranks}", err=True)
        raise typer.Exit(1)


@app.command()
def diff(
    before: Annotated[str, typer.Argument(help="A folder that `tenure run` made, or a file.")],
    after: Annotated[str, typer.Argument(help="Another one.")],
    json: Annotated[bool, typer.Option("--json", help="For machines: all of it.")] = False,
) -> None:
    """Show what grew between two runs: peak and slope, by kind, module and line.

    tenure diff main.tenure branch.tenure
    """
    from tenure.report import diff as command

    with _one_line_errors():
        runs = [_run_of(path) for path in (before, after)]
        typer.echo(_as_json(command.compared(*runs)) if json else _plain(command.text_of(*runs)))


_EXPORTS = {"csv": "tenure-csv", "trace": "tenure-trace.json", "snapshot": "tenure-snapshot.pickle"}


@app.command()
def export(
    recordings: _RECORDINGS,
    form: Annotated[
        ExportForm,
        typer.Option(
            "--as",
            help="csv: steps and storages as tables; trace: for Perfetto or chrome://tracing; "
            "snapshot: for PyTorch's viewer, pytorch.org/memory_viz.",
        ),
    ],
    out: Annotated[
        str | None,
        typer.Option("--out", help="File to write; with csv a folder.", show_default=False),
    ] = None,
    rank: Annotated[
        int | None, typer.Option(help="This one only; a snapshot has one rank, the lowest.")
    ] = None,
) -> None:
    """Write recordings in the form of another tool.

    tenure export run.tenure --as snapshot
    """
    from tenure.inspect.options import say
    from tenure.inspect.verdicts import shown_path
    from tenure.report import export as command

    with _one_line_errors():
        found = _say_what_is_left_out(recordings)
        for why in found.broken.values():
            say(why)
        place = _EXPORTS[form.value] if out is None else out
        made = command.export(found, form.value, place, rank)
        typer.echo(_plain("\n".join(f"written to {shown_path(path)}" for path in made)))


@app.command()
def top(
    folder: Annotated[
        str, typer.Argument(help="Where the run's Monitor keeps its rings.")
    ] = "run.tenure",
    sort: Annotated[TopSort, typer.Option(help="Which ranks come first.")] = TopSort["rank"],
    every: Annotated[
        float, typer.Option(min=0.1, max=3600.0, help="Seconds between two looks.")
    ] = 1.0,
    once: Annotated[
        bool,
        typer.Option("--once", help="One table, and end; so it is where output is no terminal."),
    ] = False,
    rows: Annotated[
        int | None, typer.Option(min=1, help="Most ranks shown.", show_default="what fits")
    ] = None,
    web: Annotated[bool, typer.Option("--web", help="Serve a page instead.")] = False,
    host: Annotated[str, typer.Option(help="With --web: where to listen.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="With --web: the port; 0: any that is free.")
    ] = 8765,
) -> None:
    """Follow the memory of each rank of a run, here or on a page; also after its end.

    The first line names the rank that is worst. Ranks may come and go; one that the kernel killed
    shows its last figures. Only files are read: the run does not notice.

      tenure top run.tenure --sort headroom

      tenure top run.tenure --web
    """
    from tenure.telemetry import top as command

    request = command.Request(folder, sort.value, every, once, rows)
    with _one_line_errors():
        if web:
            from tenure.telemetry import web as page

            raise typer.Exit(page.serve(request, host, port))
        raise typer.Exit(command.run(request))


pipeline = typer.Typer(
    help="Pipelines: what a schedule does on each rank, and what that costs.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
app.add_typer(pipeline, name="pipeline")
app.add_typer(store, name="store")


@pipeline.command()
def show(
    schedule: Annotated[
        str,
        typer.Option(
            metavar="NAME|FILE.csv",
            help="gpipe, 1f1b, interleaved-1f1b, looped-bfs, zb-h1, zb-v, dualpipev, or a file of "
            "one as torch.distributed.pipelining writes it.",
        ),
    ] = "1f1b",
    ranks: Annotated[
        int | None, typer.Option(min=1, help="Of the pipeline.", show_default="4, or the file's")
    ] = None,
    microbatches: Annotated[
        int | None, typer.Option(min=1, help="Of a step.", show_default="8, or the file's")
    ] = None,
    chunks: Annotated[
        int | None, typer.Option(min=1, help="Stages a rank.", show_default="the schedule's")
    ] = None,
    forward: Annotated[float, typer.Option(help="Time that a forward takes, in any unit.")] = 1.0,
    input_backward: Annotated[
        float, typer.Option(help="Time for the gradients of a stage's inputs.")
    ] = 1.0,
    weight_backward: Annotated[
        float, typer.Option(help="Time for the gradients of its weights; B takes both times.")
    ] = 1.0,
    message: Annotated[float, typer.Option(help="Time from one rank to another.")] = 0.0,
    size: Annotated[
        str,
        typer.Option(
            "--bytes",
            metavar="SIZE[,SIZE]",
            help="What a microbatch takes on a stage after its forward, and while its weights "
            "wait, by default as much: 120MiB,40MiB. Adds the most bytes in flight.",
        ),
    ] = "",
    svg: Annotated[str, typer.Option("--svg", help="File for the drawing as a picture.")] = "",
    csv: Annotated[str, typer.Option("--csv", help="File for the schedule, to edit.")] = "",
) -> None:
    """Draw a schedule: when each rank does what, what it has in flight, how long it idles.

    A row is a rank and time runs to the right: F3 is the forward of microbatch 3, B3 its backward,
    or I3 and W3 its halves, of inputs and of weights. Blank is idle time, the bubble.

      tenure pipeline show --schedule zb-h1 --ranks 4 --microbatches 8

      tenure pipeline show --schedule zb-v --bytes 120MiB,40MiB --svg zb-v.svg

      tenure pipeline show --csv mine.csv && tenure pipeline show --schedule mine.csv
    """
    from tenure.inspect.verdicts import shown_path
    from tenure.pipelining import showing as command
    from tenure.pipelining.drawing import Costs

    costs = Costs(forward, input_backward, weight_backward, message)
    request = command.Request(schedule, ranks, microbatches, chunks, costs, size)
    with _one_line_errors():
        drawing = command.draw(request)
        made = command.write(drawing, request, picture=svg, table=csv)
        command.print_text(drawing)
        for path in made:
            typer.echo(_plain(f"written to {shown_path(path)}"))


def _say_what_is_left_out(recordings: list[str]) -> Found:
    """Finds the recordings that are meant."""
    from tenure.inspect import recordings as reading
    from tenure.inspect.options import say

    found = reading.find(recordings)
    earlier = len(found.earlier)
    if earlier:
        many = "recording" if earlier == 1 else "recordings"
        say(f"{earlier} {many} of earlier runs left out: name the files to see them")
    return found


def _run_of(path: str) -> Run:
    """One of two runs that are compared, after saying what is left out of it."""
    from tenure.inspect import recordings as reading
    from tenure.inspect.options import say
    from tenure.inspect.verdicts import shown_path
    from tenure.report import diff

    found = _say_what_is_left_out([path])
    with _progress() as progress:
        verdict = reading.judge(found, progress)
    for one in verdict["left_out"]:
        say(f"left out: {one['why']}")
    return diff.run_of(found, shown_path(path), verdict)


def _has_recordings(paths: list[str]) -> bool:
    """Whether there is anything there that `tenure run` made."""
    from pathlib import Path

    from tenure.inspect import recordings as reading

    return any(not Path(path).is_dir() or reading.listed(Path(path)) for path in paths)


@contextmanager
def _progress(what: str = "recordings") -> Iterator[Callable[[int, int], None]]:
    """How far the reading is, on a terminal and if it takes more than a second."""
    import time

    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    until = time.monotonic() + 1.0
    with Progress(
        console=console, transient=True, auto_refresh=False, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(what, total=None, visible=False)

        def show(done: int, total: int) -> None:
            late = time.monotonic() > until
            bar.update(task, completed=done, total=total, visible=late, refresh=late)

        yield show


def _plain(text: str) -> str:
    from tenure.inspect.words import plain

    return plain(text)


def _as_json(verdict: dict[str, Any]) -> str:
    import json

    return json.dumps(verdict, ensure_ascii=False, indent=1)


@contextmanager
def _one_line_errors() -> Iterator[None]:
    from tenure.errors import InputError

    try:
        yield
    except InputError as error:
        typer.echo(_plain(f"tenure: {error}"), err=True)
        raise typer.Exit(2) from None


app.command(cls=TrainCommand, context_settings=SETTINGS)(_one_line_errors()(train))


def main() -> None:
    """Runs the command line: the entry point of `tenure` and of `python -m tenure`."""
    app()
