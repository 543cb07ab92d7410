"""Windows and WSL: nothing that only Linux has is asked for while modules are imported."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent.parent / "tierwise"
UNIX_MODULES = {"crypt", "fcntl", "grp", "nis", "ossaudiodev", "posix", "pty", "pwd", "readline", "resource", "spwd", "syslog", "termios", "tty"}
# Of modules that exist everywhere, names that do not.
UNIX_NAMES = {
    "os": {
        "O_DIRECT", "O_DSYNC", "O_SYNC", "O_CLOEXEC", "preadv", "pwritev", "pread", "pwrite", "fork", "getuid", "geteuid", "getgid", "sysconf",
        "statvfs", "sched_getaffinity", "sched_setaffinity", "posix_fallocate", "posix_fadvise", "uname", "nice", "killpg", "getloadavg", "mkfifo",
    },
    "mmap": {"MAP_PRIVATE", "MAP_SHARED", "MAP_ANONYMOUS", "MAP_ANON", "MAP_POPULATE", "MAP_LOCKED", "PROT_READ", "PROT_WRITE", "MADV_HUGEPAGE"},
    "signal": {"SIGKILL", "SIGUSR1", "SIGUSR2", "SIGHUP", "SIGALRM", "alarm", "setitimer", "pthread_sigmask"},
    "select": {"poll", "epoll", "kqueue"},
    "socket": {"AF_UNIX"},
}  # fmt: skip


def at_import(tree: ast.Module) -> Iterator[ast.AST]:
    """What runs when a module is imported: not the inside of functions, nor what asks for the system first, nor what may fail."""
    waiting: list[ast.AST] = list(tree.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            waiting += [*node.decorator_list, *node.args.defaults, *(default for default in node.args.kw_defaults if default)]
        elif isinstance(node, ast.Lambda) or (isinstance(node, ast.If) and _asks_first(node.test)):
            continue
        elif isinstance(node, ast.Try) and any(_catches(handler, {"ImportError", "AttributeError", "Exception"}) for handler in node.handlers):
            waiting += [*node.orelse, *node.finalbody]
        else:
            yield node
            waiting += ast.iter_child_nodes(node)


def unix_only(source: str) -> list[str]:
    found = []
    for node in at_import(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.split(".")[0] in UNIX_MODULES]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found += [node.module] if node.module.split(".")[0] in UNIX_MODULES else []
            found += [f"{node.module}.{alias.name}" for alias in node.names if alias.name in UNIX_NAMES.get(node.module, ())]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.attr in UNIX_NAMES.get(node.value.id, ()):
            found.append(f"{node.value.id}.{node.attr}")
    return found


def _asks_first(test: ast.expr) -> bool:
    text = ast.unparse(test)
    return any(word in text for word in ("TYPE_CHECKING", "sys.platform", "os.name", "hasattr(", "platform.system"))


def _catches(handler: ast.ExceptHandler, names: set[str]) -> bool:
    return handler.type is None or bool(names & set(ast.unparse(handler.type).strip("()").replace(" ", "").split(",")))


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_modules_can_be_imported_on_windows(path):
    assert unix_only(path.read_text(encoding="utf-8")) == []


def test_the_reader_sees_what_it_should():
    assert unix_only("import fcntl\nfrom resource import getrlimit\nfrom os import preadv\nFLAGS = os.O_DIRECT") == [
        "os.O_DIRECT", "os.preadv", "resource", "fcntl",
    ]  # fmt: skip
    assert unix_only("class A:\n    flags = mmap.MAP_PRIVATE\ndef f(x=signal.SIGKILL): import fcntl; os.fork()") == [
        "signal.SIGKILL",
        "mmap.MAP_PRIVATE",
    ]
    assert unix_only("try:\n    import fcntl\nexcept ImportError:\n    fcntl = None") == []
    assert unix_only("if sys.platform == 'linux':\n    import fcntl\nf = lambda: os.fork()\nX = getattr(os, 'O_DIRECT', 0)") == []
    assert unix_only("import os.path, mmap\nfrom os import path\nfrom .resource import x") == []
