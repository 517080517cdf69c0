"""The rooms of the house: which package and which room may import which, and no cycles anywhere."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("kscl", "linear_eval", "detection")

# A room imports only rooms of earlier lines. Two rooms of one line do not import each other.
ORDER = (
    ("errors", "rng"),
    ("registry",),
    ("cli",),
    ("runtime",),
    ("views",),
    ("config",),
    ("methods",),
    ("keys",),
    ("data",),
    ("backbone_file",),
    ("records",),
    ("main",),
    ("run",),
    ("engine",),
    ("benchmark", "datasets"),
    ("commands", "__main__"),
)
LEVEL = {room: level for level, rooms in enumerate(ORDER) for room in rooms}
IMPORTED_BY_NOBODY = ("commands", "benchmark", "tools", "tests")
# commands run benchmark; tools/benchmark.py measures with tests/benchmarks.
ALLOWED = {("kscl.commands", "kscl.benchmark"), ("tools.benchmark", "tests")}

Import = tuple[str, str]  # importing module, imported module


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def sources() -> dict[str, Path]:
    """Every module of the packages and tools, by its dotted name."""
    return {
        module_name(path): path
        for folder in (*PACKAGES, "tools")
        for path in sorted((ROOT / folder).rglob("*.py"))
    }


def imports_of(module: str, source: str, known: set[str]) -> set[str]:
    """Every module of the project that a source imports, also inside functions."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                raise AssertionError(f"{module} line {node.lineno}: write the full module name.")
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                found.add(full if full in known else str(node.module))
    return {name for name in found if name.split(".")[0] in (*PACKAGES, "tools", "tests")}


def all_imports() -> list[Import]:
    files = sources()
    return [
        (module, name)
        for module, path in files.items()
        for name in imports_of(module, path.read_text(encoding="utf-8"), set(files))
    ]


def room_of(module: str) -> str:
    """`kscl.methods.kscl` is in `methods`; `kscl` itself, which only has names, in no room."""
    parts = module.split(".")
    return parts[1] if parts[0] == "kscl" and len(parts) > 1 else ""


def wrong_directions(imports: list[Import]) -> list[str]:
    """What breaks the order of packages or rooms, one line per import."""
    wrong = []
    for importer, imported in imports:
        package, other = importer.split(".")[0], imported.split(".")[0]
        if package != other:
            if package == "kscl" or {package, other} == {"linear_eval", "detection"}:
                wrong.append(f"{importer} imports {imported}: {package} does not know {other}.")
        elif package == "kscl" and room_of(importer) and room_of(imported):
            mine, theirs = room_of(importer), room_of(imported)
            if mine != theirs and LEVEL[mine] <= LEVEL[theirs]:
                wrong.append(f"{importer} imports {imported}: {mine} is above {theirs}.")
    return wrong


def forbidden_targets(imports: list[Import]) -> list[str]:
    """Imports of commands, benchmark, tools or tests by anything that may not."""
    wrong = []
    for importer, imported in imports:
        target = next((part for part in imported.split(".") if part in IMPORTED_BY_NOBODY), None)
        if target is None:
            continue
        inside = imported[: imported.index(target) + len(target)]  # "kscl.benchmark"
        own_room = importer == inside or importer.startswith(f"{inside}.")
        room = ".".join(importer.split(".")[:2])
        allowed = (room, inside) in ALLOWED or (importer.split(".")[0], target) in ALLOWED
        if not (allowed or (own_room and target != "commands") or (importer, target) in ALLOWED):
            wrong.append(f"{importer} imports {imported}.")
    return wrong


def find_cycle(imports: list[Import]) -> list[str]:
    """One chain of modules that imports itself, or nothing."""
    after: dict[str, set[str]] = {}
    for importer, imported in imports:
        after.setdefault(importer, set()).add(imported)
    finished: set[str] = set()

    def visit(module: str, chain: list[str]) -> list[str]:
        if module in chain:
            return [*chain[chain.index(module) :], module]
        if module in finished:
            return []
        for name in sorted(after.get(module, ())):
            if cycle := visit(name, [*chain, module]):
                return cycle
        finished.add(module)
        return []

    for module in sorted(after):
        if cycle := visit(module, []):
            return cycle
    return []


def without_type_checking(source: str) -> str:
    """The source without what only a type checker imports: no cycle at run time comes of it."""
    tree = ast.parse(source)

    class Drop(ast.NodeTransformer):
        def visit_If(self, node: ast.If) -> ast.AST | None:
            test = node.test
            return None if isinstance(test, ast.Name) and test.id == "TYPE_CHECKING" else node

    return ast.unparse(Drop().visit(tree))


def test_every_room_has_a_place_in_the_order():
    rooms = {room_of(module) for module in sources()} - {""}
    assert rooms == set(LEVEL)


def test_imports_point_one_way():
    assert wrong_directions(all_imports()) == []


def test_nobody_imports_commands_benchmark_tools_or_tests():
    assert forbidden_targets(all_imports()) == []


def test_no_modules_import_each_other_in_a_circle():
    files = sources()
    imports = [
        (module, name)
        for module, path in files.items()
        for name in imports_of(module, without_type_checking(path.read_text()), set(files))
        if name != module and not module.startswith(f"{name}.")
    ]
    assert find_cycle(imports) == []


@pytest.mark.parametrize(
    ("importer", "imported"),
    [
        ("kscl.methods.kscl", "kscl.engine.loop"),
        ("kscl.methods.encoder", "kscl.data.loader"),
        ("kscl.config", "kscl.methods.subspace"),
        ("kscl.engine.pretrain", "detection.config"),
        ("linear_eval.probe", "detection.config"),
        ("detection.config", "linear_eval.probe"),
    ],
)
def test_an_import_turned_around_is_found(importer: str, imported: str):
    assert wrong_directions([(importer, imported)])


@pytest.mark.parametrize(
    ("importer", "imported"),
    [
        ("kscl.engine.pretrain", "kscl.commands.pretrain"),
        ("kscl.commands.plan", "kscl.commands.pretrain"),
        ("kscl.engine.pretrain", "kscl.benchmark.suite.spec"),
        ("detection.train.detect", "kscl.benchmark.leaderboard.rows"),
        ("kscl.cli", "tools.pretrain"),
        ("tools.pretrain", "tests.helpers.runs"),
    ],
)
def test_an_import_of_what_nobody_imports_is_found(importer: str, imported: str):
    assert forbidden_targets([(importer, imported)])


@pytest.mark.parametrize(
    ("importer", "imported"),
    [
        ("kscl.commands.leaderboard", "kscl.benchmark.leaderboard.rows"),
        ("kscl.benchmark.leaderboard.rows", "kscl.benchmark.leaderboard.tables"),
        ("tools.pretrain", "kscl.main"),
        ("tools.benchmark", "tests.benchmarks.run"),
    ],
)
def test_what_the_house_allows_is_allowed(importer: str, imported: str):
    assert wrong_directions([(importer, imported)]) == []
    assert forbidden_targets([(importer, imported)]) == []


def test_a_cycle_is_found():
    assert find_cycle([("a", "b"), ("b", "c"), ("c", "a")]) == ["a", "b", "c", "a"]
    assert find_cycle([("a", "b"), ("a", "c"), ("b", "c")]) == []
