"""What `tenure info` prints: the versions, parts, devices and limits that a bug report needs.

Nothing is guessed: a fact that this machine does not give is left out. Of the environment only
variables on an allow-list are shown, because a report is public and an environment is not.
"""

from __future__ import annotations

import json
import os
import platform
import re
import resource
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tenure import _C, _build
from tenure.storages import release

Json = str | int | float | bool | None | list["Json"] | dict[str, "Json"]

SCHEMA = 1

_SHOWN_VARIABLES = re.compile(r"PYTORCH_\w+|OMP_NUM_THREADS|CUDA_VISIBLE_DEVICES|TENURE\w*")

_LEFT_OUT_WITHOUT = {
    "asio": ("store over TCP", "Asio"),
    "openssl": ("authenticated store over TCP", "OpenSSL"),
    "sqlite": ("recordings", "SQLite"),
}

_OVERCOMMIT = {0: "heuristic", 1: "always", 2: "never"}


@dataclass(frozen=True)
class Fact:
    """One line: `value` for machines, `text` for people."""

    key: str
    value: Json
    text: str
    label: str = ""


@dataclass(frozen=True)
class Section:
    """Facts of one kind, under a title that is also their key in JSON."""

    title: str
    facts: list[Fact]


def collect() -> list[Section]:
    """Reads everything there is to say of this installation and machine.

    Example:
        >>> from tenure import info
        >>> [section.title for section in info.collect()][:2]
        ['versions', 'devices']
    """
    return [
        Section("versions", list(_versions())),
        Section("devices", list(_devices())),
        Section("parts", list(_parts())),
        Section("limits", list(_limits())),
        Section("environment", list(_environment(os.environ))),
    ]


def as_json(sections: list[Section]) -> dict[str, Json]:
    """The same facts as one object, with sizes in bytes."""
    out: dict[str, Json] = {"schema": SCHEMA}
    for section in sections:
        out[section.title] = {fact.key: fact.value for fact in section.facts}
    return out


def print_json(sections: list[Section]) -> None:
    """Writes the facts to standard output as JSON."""
    json.dump(as_json(sections), sys.stdout, indent=2)
    sys.stdout.write("\n")


def print_text(sections: list[Section], console: Console | None = None) -> None:
    """Writes the facts for people: a table in a terminal, else plain lines that never wrap."""
    console = console or Console(highlight=False)
    shown = [section for section in sections if section.facts]
    if console.is_terminal:
        console.print(_table(shown))
        return
    for section in shown:
        for place, fact in enumerate(section.facts):
            title = section.title if place == 0 else ""
            console.file.write(f"{title:<12} {_label(fact):<20} {fact.text}\n")


def _table(sections: list[Section]) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    for section in sections:
        for place, fact in enumerate(section.facts):
            title = section.title if place == 0 else ""
            table.add_row(Text(title), Text(_label(fact)), Text(fact.text))
    return table


def _label(fact: Fact) -> str:
    return fact.label or fact.key.replace("_", " ")


def _versions() -> Iterator[Fact]:
    yield Fact("tenure", _build.VERSION, _build.VERSION)
    yield _torch_version()
    python = platform.python_version()
    yield Fact("python", python, f"{python} ({platform.python_implementation()})")
    yield _platform()
    libc = " ".join(platform.libc_ver())
    yield Fact("libc", libc, libc)
    build = [_build.COMPILER, _build.BUILD_TYPE, *filter(None, [_build.SANITIZE])]
    yield Fact("compiler", build[0], ", ".join(build))


def _torch_version() -> Fact:
    running = str(torch.__version__)
    toolkit = _toolkit()
    text = f"{running}, built against {_build.TORCH_VERSION}, {toolkit or 'CPU only'}"
    value: dict[str, Json] = {
        "running": running,
        "built_against": _build.TORCH_VERSION,
        "git": torch.version.git_version,
        "toolkit": toolkit,
    }
    return Fact("torch", value, text)


def _toolkit() -> str | None:
    for name in ("cuda", "hip", "xpu"):
        version = getattr(torch.version, name, None)
        if version:
            return f"{name.upper()} {version}"
    return None


def _platform() -> Fact:
    system = f"{platform.system()} {platform.release()}"
    cores = len(os.sched_getaffinity(0))
    value: dict[str, Json] = {
        "system": system,
        "distribution": _distribution(),
        "machine": platform.machine(),
        "cores": cores,
        "threads": torch.get_num_threads(),
    }
    words = filter(None, [_distribution(), system, platform.machine(), f"{cores} cores"])
    return Fact("platform", value, ", ".join(words))


def _distribution() -> str | None:
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME")
    except OSError:
        return None


def _devices() -> Iterator[Fact]:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        yield Fact("accelerator", None, "none")
        return
    for index in range(torch.accelerator.device_count()):
        device = torch.device(accelerator.type, index)
        name, memory = _device_properties(device)
        text = name if memory is None else f"{name}, {_C.bytes_text(memory)}"
        yield Fact(str(device), {"name": name, "memory": memory}, text)
    driver = _driver()
    if driver:
        yield Fact("driver", driver, driver)


def _device_properties(device: torch.device) -> tuple[str, int | None]:
    """Name and bytes, where torch has them: each backend has a module with what it can say."""
    properties_of = getattr(torch.get_device_module(device), "get_device_properties", None)
    properties = properties_of(device) if properties_of else None
    memory = getattr(properties, "total_memory", None)
    return str(getattr(properties, "name", device.type)), memory


def _driver() -> str | None:
    """NVIDIA's, from the kernel module itself."""
    found = re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)\s", _read("/proc/driver/nvidia/version"))
    return found[1] if found else None


def _parts() -> Iterator[Fact]:
    yield Fact("built", list(_build.PARTS), ", ".join(_build.PARTS))
    left_out: dict[str, Json] = {}
    for dependency, (part, name) in _LEFT_OUT_WITHOUT.items():
        if not _build.HAVE[dependency]:
            left_out[part] = f"{name} was not found at build time"
    text = "; ".join(f"{part} ({reason})" for part, reason in left_out.items())
    yield Fact("left_out", left_out, text or "nothing")
    yield _use_after_release()


def _use_after_release() -> Fact:
    """How a read of a released storage fails with the torch at hand: tried, not looked up."""
    tensor = torch.zeros(1)
    release(tensor)
    try:
        tensor.tolist()
    except RuntimeError as error:
        named = str(error).startswith("UseAfterRelease:")
    else:
        named = False
    how = "the error names storage and releaser" if named else "torch's own error, without names"
    return Fact("use_after_release", {"named": named}, how)


def _limits() -> Iterator[Fact]:
    yield _rlimit("memlock", resource.RLIMIT_MEMLOCK, in_bytes=True)
    yield _rlimit("open_files", resource.RLIMIT_NOFILE)
    if resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY:
        yield _rlimit("address_space", resource.RLIMIT_AS, in_bytes=True)
    if resource.getrlimit(resource.RLIMIT_DATA)[0] != resource.RLIM_INFINITY:
        yield _rlimit("data", resource.RLIMIT_DATA, in_bytes=True)
    yield from _memory()
    yield from _shared_memory()
    maps = _read("/proc/sys/vm/max_map_count").strip()
    if maps:
        yield Fact("max_map_count", int(maps), maps)
    policy = _read("/proc/sys/vm/overcommit_memory").strip()
    if policy:
        number = int(policy)
        yield Fact("overcommit", number, f"{_OVERCOMMIT.get(number, 'unknown')} ({number})")


def _rlimit(key: str, which: int, *, in_bytes: bool = False) -> Fact:
    limits = [
        None if value == resource.RLIM_INFINITY else value for value in resource.getrlimit(which)
    ]
    soft, hard = (_limit_text(value, in_bytes=in_bytes) for value in limits)
    text = soft if soft == hard else f"{soft}, at most {hard}"
    return Fact(key, {"soft": limits[0], "hard": limits[1]}, text)


def _limit_text(value: int | None, *, in_bytes: bool) -> str:
    if value is None:
        return "unlimited"
    return _C.bytes_text(value) if in_bytes else str(value)


def _memory() -> Iterator[Fact]:
    process = _C.sample().process
    if process.host_total is not None and process.host_available is not None:
        total, free = process.host_total, process.host_available
        yield _space("memory", total, free, word="available")
    cgroup = process.cgroup
    if cgroup is not None:
        limit = "no limit" if cgroup.limit is None else f"limit {_C.bytes_text(cgroup.limit)}"
        value: dict[str, Json] = {"limit": cgroup.limit, "usage": cgroup.usage}
        yield Fact("cgroup", value, f"{limit}, {_C.bytes_text(cgroup.usage)} used")


def _shared_memory() -> Iterator[Fact]:
    try:
        usage = shutil.disk_usage("/dev/shm")
    except OSError:
        yield Fact("dev_shm", None, "not mounted", label="/dev/shm")
        return
    yield _space("dev_shm", usage.total, usage.free, word="free", label="/dev/shm")


def _space(key: str, total: int, free: int, *, word: str, label: str = "") -> Fact:
    text = f"{_C.bytes_text(total)}, {_C.bytes_text(free)} {word}"
    return Fact(key, {"total": total, word: free}, text, label=label)


def _environment(variables: Mapping[str, str]) -> Iterator[Fact]:
    for name in sorted(variables):
        if _SHOWN_VARIABLES.fullmatch(name):
            value = variables[name]
            shown = value if value.isprintable() else ascii(value)
            yield Fact(name, value, shown, label=name)


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
