"""`python -m tests.house [--record]`: what is left of today's knots in the product's files; house.json may only shrink.

- `cycles`: files that import one another in a circle, type-only and lazy imports counted; `engine/raft` is one unit.
- `whole`: parameters, per file, through which a part is given the composed system or node.
- `foreign`: assignments, per file, to a field of an object that the function was given: only its own class writes it.
- `prose`: docstrings, per file, that begin with another word than a verb.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from .source_tree import Source, product_sources

EXEMPT: Mapping[tuple[str, str], str] = MappingProxyType(
    {
        ("client/background.py", "_last(failure).__context__"): "a built-in exception's context has no other setter",
        ("service/etcd/app.py", "app.router.redirect_slashes"): "starlette makes the router itself, and asks for it so",
        ("service/etcd/connections.py", "connections.cancel_scope.deadline"): "trio sets deadlines so",
    }
)
"""Foreign assignments, (file, target), that stay, each for a reason: where that is speed, with the figure."""
RECORDED = Path(__file__).with_name("house.json")
UNIT = "engine/raft/"
WHOLES = frozenset({"System", "Node"})
VERB = re.compile(r"[A-Z][a-z]+(-[a-z]+)?")
NO_VERB = re.compile(r".*[^s]s|.{3,}ing|(?!.*ceed).{4,}ed|.*[^p]ly|.*(tion|ness|ship)")
"""Plurals and the third person, gerunds, participles, adverbs, nouns."""
NO_VERBS = frozenset(
    re.findall(
        r"\w+",
        """
    A An The This These That Those It Its What Who Whom Whose Which Whether How Where When Why One Two All Any Each
    Every Some Both None No Nothing Nobody Of In On At To From For With Without By Not Before After Until While If
    As Bytes Seconds So Such Only Between Below Above Behind Beside Here There They
    Another Everything Everyone Something Somebody Several More Most Many Other Even Whatever Whoever Unless Around Per
    Never Now Once Also Up Their True False Is Does Was Would May Won Dead Last Small Regular Healthy Typed Hard Plain
    Unborn Known Entry Payload Metadata Message Machine Revision Version Body Text User Key Law Paper Type Status Meta
    Size Leadership Head Header Damage Live Progress Resident Durable Median Ciphertext Plaintext Loopback Back
    """,
    )
)


def cycles(sources: Iterable[Source]) -> list[list[str]]:
    """Return the groups of files, two or more, of which each reaches each other by imports."""
    files = {source.module: source for source in sources}
    edges = {source.path: sorted(_targets(source, files)) for source in files.values()}
    return sorted(sorted(group) for group in _components(edges) if len(group) > 1 and not _one_unit(group))


def _one_unit(group: Sequence[str]) -> bool:
    return all(path.startswith(UNIT) for path in group)


def _targets(source: Source, files: dict[str, Source]) -> set[str]:
    found = set()
    for _, name in source.imports:
        module = name
        while module and module not in files:
            module = module.rpartition(".")[0]
        if module and files[module] is not source and not files[module].path.endswith("__init__.py"):
            found.add(files[module].path)
    return found


def _components(edges: dict[str, list[str]]) -> Iterator[list[str]]:
    """Yield the strongly connected components (Tarjan), without recursion."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    held: list[str] = []
    inside: set[str] = set()
    for root in edges:
        if root in order:
            continue
        work = [(root, iter(edges[root]))]
        order[root] = low[root] = len(order)
        held.append(root)
        inside.add(root)
        while work:
            node, rest = work[-1]
            for target in rest:
                if target not in order:
                    order[target] = low[target] = len(order)
                    held.append(target)
                    inside.add(target)
                    work.append((target, iter(edges[target])))
                    break
                if target in inside:
                    low[node] = min(low[node], order[target])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == order[node]:
                    found = []
                    while True:
                        found.append(held.pop())
                        inside.discard(found[-1])
                        if found[-1] == node:
                            break
                    yield found


def wholes(source: Source) -> int:
    """Count the parameters annotated with a composed object."""
    count = 0
    for node in source.nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            count += sum(_name(one.annotation) in WHOLES for one in given)
    return count


def _name(annotation: ast.expr | None) -> str:
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        return annotation.value.strip("'\"")
    return annotation.id if isinstance(annotation, ast.Name) else ""


def foreign(source: Source) -> list[int]:
    """Return the lines that assign to a field of something that was neither made here nor is `self` or `cls`, without
    those that are exempt."""
    found = []
    for node in source.nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            own = {"self", "cls"} | _made(node)
            found += [
                target.lineno
                for target in _fields(node)
                if _root(target) not in own and (source.path, ast.unparse(target)) not in EXEMPT
            ]
    return sorted(set(found))


def _made(function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    """Return the names that are bound to what a call gave, in this very function."""
    found = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        if isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Call) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
    return found


def _fields(function: ast.AST) -> Iterator[ast.Attribute]:
    for node in ast.walk(function):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            targets = [node.target]
        for target in targets:
            for one in target.elts if isinstance(target, ast.Tuple) else [target]:
                if isinstance(one, ast.Attribute):
                    yield one


def _root(target: ast.Attribute) -> str:
    """Return `self` for self.x, the dotted rest for anything that is a field of a field."""
    return target.value.id if isinstance(target.value, ast.Name) else ast.unparse(target.value)


def prose(source: Source) -> list[tuple[int, str]]:
    """Return (line, first word) of the docstrings of functions and methods that do not begin with a verb."""
    found = []
    for node in source.nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            words = (ast.get_docstring(node) or "").split(maxsplit=1)
            if words and not any(_name(one) == "property" for one in node.decorator_list):
                word = words[0].rstrip(".,:;")
                if not VERB.fullmatch(word) or word in NO_VERBS or NO_VERB.fullmatch(word):
                    found.append((node.lineno, word))
    return found


def measure() -> dict[str, Any]:
    """Return what house.json holds."""
    sources = product_sources()

    def counts(rows: Iterable[tuple[str, int]]) -> dict[str, int]:
        return {path: count for path, count in sorted(rows) if count}

    return {
        "cycles": cycles(sources),
        "whole": counts((source.path, wholes(source)) for source in sources),
        "foreign": counts(
            (source.path, len(foreign(source))) for source in sources if not source.path.startswith(UNIT)
        ),
        "prose": counts((source.path, len(prose(source))) for source in sources),
    }


def grown(now: dict[str, Any], kept: dict[str, Any]) -> list[str]:
    """Return what is worse than recorded. A file that was renamed brings its count along: totals are compared too."""
    known = {path for group in kept["cycles"] for path in group}
    largest = max(map(len, kept["cycles"]), default=0)
    found = [
        f"these files import one another: {', '.join(group)}"
        for group in now["cycles"]
        if len(group) > largest or (not known and group)
    ]
    if sum(map(len, now["cycles"])) > sum(map(len, kept["cycles"])):
        new = Counter(path for group in now["cycles"] for path in group) - Counter(known)
        found.append(f"more files than before import one another: {', '.join(sorted(new))}")
    for kind in ("whole", "foreign", "prose"):
        before, after = sum(kept[kind].values()), sum(now[kind].values())
        if after > before:
            rows = [f"{path} {count}" for path, count in now[kind].items() if count > kept[kind].get(path, 0)]
            found.append(f"{kind}: {after}, recorded {before}: {', '.join(rows)}")
    return found


def main(arguments: Sequence[str]) -> int:
    """Print what there is, and each docstring that does not begin with a verb; `--record`: write it down."""
    now = measure()
    for source in product_sources():
        for line, word in prose(source):
            print(f"{source.path}:{line}: {word}", file=sys.stderr)
    if "--record" in arguments:
        RECORDED.write_text(json.dumps(now, indent=1) + "\n")
    print(json.dumps({
        "cycles": [len(group) for group in now["cycles"]],
        **{kind: sum(now[kind].values()) for kind in ("whole", "foreign", "prose")},
    }))  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
