"""What mkdocs calls while it builds the site: pages that are made of other files are made here, each time, so that none of them can be stale.

reference/commands.md         what every command says with --help          make_commands.py
reference/api.md              docstrings of the public names               make_api.py
reference/machines.md         the machine files                            make_reference.py
reference/policies/index.md   the table of policies, from their docstrings make_reference.py
reference/policies/NAME.md    one policy, and its time against memory      make_policies.py
accuracy.md, benchmarks.md    committed result files                       make_accuracy.py, benchmarks/RESULTS.md
zoo.md                        the result of benchmarks/cases/zoo.py        make_zoo.py
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path[:0] = [path for path in (str(ROOT),) if path not in sys.path]  # `mkdocs serve` starts elsewhere

from mkdocs.structure.files import File, Files  # noqa: E402

from docs import make_accuracy, make_api, make_commands, make_pictures, make_policies, make_reference, make_zoo  # noqa: E402
from tierwise import policies  # noqa: E402

FOUR_WAYS = "<!-- picture: four ways -->"


def on_config(config: Any) -> Any:
    """The policies below their table, and the table of the field if there is one."""
    for section in config.nav:
        for title, pages in section.items():
            if title == "Reference":
                table = next(place for place, page in enumerate(pages) if "Policies" in page)
                pages[table] = {"Policies": ["reference/policies/index.md", *(f"reference/policies/{name}.md" for name in policies.names())]}
            if title == "Results" and make_policies.zoo_result():
                pages.insert(0, {"The field on one engine": "zoo.md"})
    return config


def on_files(files: Files, config: Any) -> Files:
    for path, content in made():
        if (written := files.get_file_from_path(path)) is not None:
            files.remove(written)
        files.append(File.generated(config, path, content=content))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    return markdown.replace(FOUR_WAYS, make_pictures.four_ways()) if FOUR_WAYS in markdown else markdown


def made() -> Iterator[tuple[str, str]]:
    """Each page that nobody wrote: where it goes, and what is in it."""
    yield "reference/commands.md", make_commands.commands_page()
    yield "reference/api.md", make_api.api_page()
    yield "reference/machines.md", make_reference.machines_page()
    yield "reference/policies/index.md", make_reference.policies_page()
    for name in policies.names():
        yield f"reference/policies/{name}.md", make_policies.policy_page(name)
    yield "accuracy.md", make_accuracy.accuracy_page()
    yield "benchmarks.md", (ROOT / "benchmarks" / "RESULTS.md").read_text(encoding="utf-8")  # made of the result files, and tested to be
    if make_policies.zoo_result():
        page, pictures = make_zoo.zoo_page()
        yield "zoo.md", page
        for name, picture in pictures.items():
            yield f"pictures/zoo/{name}.svg", picture
