"""The laws of ARCHITECTURE.md about the size and the names of rooms: what is a package, a module, a class."""

import ast
from collections import defaultdict
from pathlib import Path

SOURCES = Path(__file__).resolve().parents[1] / "src" / "phasesplit"

MOST_MODULES = 25
"""In one package, besides its `__init__`."""
MOST_PARAMETERS = 12
"""Of one function."""
SHORT_LINES = 250
"""A module of at most so many lines whose only importer is a sibling is a part of that sibling."""
APART = {
    "engine.memory": "which blocks a request holds and which are kept for later prompts; `loop` is when",
    "engine.kernels.quantised": "products of one kind of weights, next to `plain`, its twin in NumPy",
    "engine.kernels.rowwise": "kernels of one kind; `calls` is what the forward pass sees of all kinds",
    "gateway.response_stream": "what a client is sent, held until there is content; `app` is the pages",
    "gateway.legs": "what a request becomes on each machine; a field of the endpoint is added here",
    "io.operator_engine": "the only module that calls aiconfigurator",
    "launcher.gateway_process": "imported while the workers start, which take longest",
    "planner.journal": "a format of a file, which `--resume` reads again",
    "planner.study.reproduction_page": "a page, which is drawn without running the study",
    "profiling.endpoint_machine": "an endpoint as a machine that is timed, next to `engine_machine`",
    "profiling.record": "what a profile says of its host; written without a terminal",
    "validation.prediction": "the simulated side of a comparison; the measured one is `live`",
    "vllm.connector_machine": "runs where vLLM is not installed",
    "vllm.device_blocks": "runs where vLLM is not installed",
}
"""Short modules with one importer that stay apart: why."""
ROLES_OF_MODULES = {"schema"}
"""Names that a module may share with one of another package."""


def modules() -> dict[str, Path]:
    """Return every module with code by its dotted name under phasesplit; packages are left out."""
    return {
        ".".join(path.relative_to(SOURCES).with_suffix("").parts): path
        for path in sorted(SOURCES.rglob("*.py"))
        if path.name not in ("__init__.py", "__main__.py")
    }


def lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def importers(names: set[str]) -> dict[str, set[str]]:
    """Return for each module who imports it, also inside functions."""
    found: dict[str, set[str]] = defaultdict(set)
    for path in SOURCES.rglob("*.py"):
        importer = ".".join(path.relative_to(SOURCES).with_suffix("").parts)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("phasesplit"):
                module = (node.module or "").removeprefix("phasesplit").lstrip(".")
                for name in (module, *(f"{module}.{alias.name}".lstrip(".") for alias in node.names)):
                    if name in names and name != importer:
                        found[name].add(importer)
    return found


def halves() -> set[str]:
    """Return the short modules whose only importer is a module of their own package."""
    found = modules()
    used = importers(set(found))
    return {
        name
        for name, path in found.items()
        if len(used[name]) == 1
        and lines(path) <= SHORT_LINES
        and next(iter(used[name])).rpartition(".")[0] == name.rpartition(".")[0]
        and not next(iter(used[name])).endswith("__init__")
    }


def test_packages_are_taken_in_at_a_glance() -> None:
    """A package would hold more modules than a reader keeps in mind."""
    counts: dict[str, int] = defaultdict(int)
    for name in modules():
        counts[name.rpartition(".")[0]] += 1
    assert {package: count for package, count in counts.items() if count > MOST_MODULES} == {}


def test_no_module_is_half_of_another() -> None:
    """A reader would have to open two modules for one concept; or a reason would stand for a module that is gone."""
    assert halves() == set(APART)


def test_a_name_means_one_module() -> None:
    """Two modules of one name would be mistaken for each other."""
    places: dict[str, list[str]] = defaultdict(list)
    for name in modules():
        places[name.rpartition(".")[2]].append(name)
    twice = {name: found for name, found in places.items() if len(found) > 1 and name not in ROLES_OF_MODULES}
    assert twice == {}


def test_a_name_means_one_class() -> None:
    """Two classes of one name would be mistaken for each other."""
    places: dict[str, list[str]] = defaultdict(list)
    for name, path in modules().items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(name)
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    found = node.args
    named = len(found.posonlyargs + found.args + found.kwonlyargs)
    return named + (found.vararg is not None) + (found.kwarg is not None)


def test_no_function_takes_more_than_a_reader_can_hold() -> None:
    """A caller would mix up arguments; what belongs together is a group of options or a class of its own."""
    counts = {
        f"{name}.{node.name}": parameters(node)
        for name, path in modules().items()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert {name: count for name, count in counts.items() if count > MOST_PARAMETERS} == {}
