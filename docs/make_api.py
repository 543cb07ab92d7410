"""The page of the API, read from the sources without importing them: signatures and docstrings of the public names. Nothing there is typed in."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
SECTIONS = {  # module -> what it is for; where that is "", its own docstring says it
    "tierwise": "What a training script needs.",
    "tierwise.fitting": "What `plan_of` returns.",
    "tierwise.integrations.huggingface": "",
    "tierwise.integrations.lightning": "",
    "tierwise.integrations.compiler": "",
    "tierwise.ir": "The types that everything passes on. Nothing here imports torch.",
    "tierwise.pipeline": "The stages, composed.",
    "tierwise.policies": "Problem in, schedule out.",
    "tierwise.simulate": "Schedule in, timeline out.",
    "tierwise.machines": "Machines that are shipped.",
    "tierwise.report": "Runs in, pages out.",
}
NAMES = {  # where not everything that is public there is for users, or a file has no list of its own
    "tierwise": ["fit", "plan_of", "stats", "watch", "release", "capture"],
    "tierwise.fitting": ["Plan"],
    "tierwise.integrations.compiler": [""],
    "tierwise.machines": ["names", "load"],
    "tierwise.policies": ["names", "card", "plan", "planned"],
}
LINE = 100
Definition = ast.FunctionDef | ast.ClassDef


def api_page() -> str:
    parts = ["# API\n\nMade from the docstrings when the site is built.\n"]
    for module, purpose in SECTIONS.items():
        parts.append(f"## {module}\n\n{purpose or ast.get_docstring(_parsed(module))}\n")
        prefix = "tierwise." if module == "tierwise" else ""  # elsewhere the section says it
        parts += [entry(f"{prefix}{name}", *found) for name, found in public(module)]
        if module == "tierwise":
            parts += ["### Errors\n\nAll are in `tierwise.errors`, and say what is wrong, what would be right and what to do.\n", errors_table()]
    return "\n".join(parts)


def errors_table() -> str:
    """The tree of exceptions, each below the one it is a kind of."""
    classes = [node for node in _parsed("tierwise.errors").body if isinstance(node, ast.ClassDef)]
    lines = ["| error | |", "|---|---|"]

    def add(parent: str, depth: int) -> None:
        for node in classes:
            if node.bases and ast.unparse(node.bases[0]) == parent:
                lines.append(f"| {'&emsp;' * depth}`{node.name}` | {' '.join((ast.get_docstring(node) or '').split())} |")
                add(node.name, depth + 1)

    add("Exception", 0)
    return "\n".join(lines) + "\n"


def prose(text: str) -> str:
    """A docstring as Markdown: lines of the form `name    what it is` are a list."""
    return re.sub(r"^(\w+) {2,}(\S.*)$", r"- `\1`: \2", text, flags=re.M)


def public(module: str) -> Iterator[tuple[str, tuple[Definition, list[str]]]]:
    """The public names of a module that are functions or classes, each with its definition and the lines of the file that has it."""
    tree = _parsed(module)
    for name in NAMES.get(module) or _listed(tree) or [node.name for node in tree.body if isinstance(node, Definition) and node.name[0] != "_"]:
        if (found := _defined(module, name)) is not None:
            yield name, found


def entry(name: str, definition: Definition, source: list[str]) -> str:
    """One function, or one class with its fields and methods."""
    text = prose(ast.get_docstring(definition) or "")
    if isinstance(definition, ast.FunctionDef):
        return f"### {name}\n\n```python\n{_signature(definition)}\n```\n\n{text}\n"
    fields = [node for node in definition.body if isinstance(node, ast.AnnAssign) and not ast.unparse(node.target).startswith("_")]
    bases = f"({', '.join(map(ast.unparse, definition.bases))})" if definition.bases else ""
    head = "\n".join([f"class {definition.name}{bases}", *(f"    {source[field.lineno - 1].strip()}" for field in fields)])
    methods = [node for node in definition.body if isinstance(node, ast.FunctionDef) and node.name[0] != "_" and ast.get_docstring(node)]
    told = [f"- `{_signature(method).removeprefix('def ')}`: {' '.join((ast.get_docstring(method) or '').split())}" for method in methods]
    return f"### {name}\n\n```python\n{head}\n```\n\n{text}\n\n" + "".join(f"{line}\n" for line in told)


def _signature(function: ast.FunctionDef) -> str:
    returns = f" -> {ast.unparse(function.returns)}" if function.returns else ""
    arguments = list(_arguments(ast.unparse(function.args)))
    line = f"def {function.name}({', '.join(arguments)}){returns}"
    if len(line) <= LINE:
        return line
    return "\n".join([f"def {function.name}(", *(f"    {argument}," for argument in arguments), f"){returns}"])


def _arguments(text: str) -> Iterator[str]:
    """Cut at the commas that stand between arguments, not inside of brackets; with spaces around = where there is a type."""
    start = depth = 0
    for place, letter in enumerate(f"{text},"):
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0 and start < place:
            name, colon, rest = text[start:place].strip().partition(": ")
            yield f"{name}{colon}{rest.replace('=', ' = ', 1)}"
            start = place + 1


# -- where a name comes from -------------------------------------------------------------------------------------------------------------


def _file(module: str) -> Path:
    path = ROOT.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _parsed(module: str) -> ast.Module:
    return ast.parse(_file(module).read_text(encoding="utf-8"))


def _listed(tree: ast.Module) -> list[str]:
    """__all__, where it is a plain list; for `tierwise` itself the names it loads when they are used."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in ("__all__", "_HOMES"):
            try:
                return list(ast.literal_eval(node.value))
            except ValueError:
                continue
    return []


def _defined(module: str, name: str) -> tuple[Definition, list[str]] | None:
    """The definition itself, with the lines of its file, followed through imports; None for what is neither a function nor a class."""
    nodes = _parsed(module).body
    for node in [*nodes, *(within for block in nodes if isinstance(block, ast.If) for within in block.body)]:
        if isinstance(node, Definition) and node.name == name:
            return node, _file(module).read_text(encoding="utf-8").splitlines()
        if isinstance(node, ast.ImportFrom) and node.level:
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    package = module.split(".") if _file(module).name == "__init__.py" else module.split(".")[:-1]
                    base = package[: len(package) - node.level + 1]
                    return _defined(".".join([*base, *(node.module or "").split(".")]).rstrip("."), alias.name)
    return None
