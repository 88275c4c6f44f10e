"""The laws of ARCHITECTURE.md that an import contract cannot check, and that each check finds what it forbids."""

import ast
import re
import tomllib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ROOT / "src" / "phasesplit"
COMPILED = ("scheduler", "simulator")
KERNELS = SOURCES / "engine" / "kernels"

MOST_LINES = 800
VAGUE_WORDS = {"util", "utils", "helper", "helpers", "common", "misc", "info"}
VAGUE_CLASS_WORDS = VAGUE_WORDS - {"info"}
VAGUE_STARTS = ("process_", "do_")
WORLDLY_MODULES = {
    "asyncio", "datetime", "glob", "io", "os", "pathlib", "random", "secrets", "shutil", "socket", "subprocess", "sys",
    "tempfile", "threading", "time", "uuid",
}  # fmt: skip
WORLDLY_CALLS = {"open", "print", "input", "breakpoint", "exec", "eval"}
PATH_CALLS = {"read_text", "read_bytes", "write_text", "write_bytes"}
OPEN_PATHS = {
    "_jit.py": "hashes the sources that it compiles",
    "atomic_files.py": "writes beside the place, then renames",
    "cli": "sends its output to nowhere once its reader has gone",
    "console": "copies a report to the place that is asked for",
    "doctor.py": "tries memory and storage of this host",
    "engine": "reads a model, and caches its packed weights",
    "io": "reads and writes every other format",
    "kv_transfer": "reads the boot id of this host",
    "launcher": "reads what the kernel says of its own processes",
    "planner": "writes a plan's documents and its journal, and reads how many cores the container may use",
    "profiling": "reads what the kernel says of this host",
    "validation": "reads what the kernel says of the processes that it runs",
    "vllm": "reads the configuration of a model",
}
"""Packages, and modules beside them, that open paths: what for."""
SEEDED = {"default_rng", "SeedSequence"}
SEEDED_TYPES = {"Generator", "BitGenerator", "PCG64"}
MACHINE_PATH = re.compile(r"(?<![\w.~/-])/(?:work|root|home|Users)/")
PROJECT_TEXT = ("src", "tests", "docs", "bench", "scripts", ".ci", "Makefile", "pyproject.toml", "NOTICE")
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])

Check = Callable[[ast.Module], list[str]]
Function = ast.FunctionDef | ast.AsyncFunctionDef


def centre() -> list[Path]:
    """Return the modules that do no input or output: those that the import contract of this name lists."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
    (contract,) = (one for one in contracts if one["name"] == "The centre does no input or output")
    places = [SOURCES.parent.joinpath(*name.split(".")) for name in contract["source_modules"]]
    found = [
        path for place in places for path in ([place.with_suffix(".py")] if not place.is_dir() else place.rglob("*.py"))
    ]
    assert all(path.is_file() for path in found)
    return found


def modules(*packages: str) -> list[Path]:
    """Return the package's modules, or only those of the named subpackages."""
    found = [
        path for path in sorted(SOURCES.rglob("*.py")) if not packages or path.relative_to(SOURCES).parts[0] in packages
    ]
    assert found, f"no modules under {SOURCES}"
    return found


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def violations(check: Check, paths: list[Path]) -> list[str]:
    """Return what a check finds in files, with the place."""
    return [f"{path.relative_to(ROOT)}: {found}" for path in paths for found in check(parsed(path))]


def imported(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield line and top-level name of every import, also those inside functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name.split(".")[0]) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            yield node.lineno, node.module.split(".")[0]


def numba_imports(tree: ast.Module) -> list[str]:
    return [f"line {line} imports {name}" for line, name in imported(tree) if name in ("numba", "llvmlite")]


def vague_names(tree: ast.Module) -> list[str]:
    """Return functions and classes whose names say that something is done, but not what."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, Function) and node.name.lstrip("_").startswith(VAGUE_STARTS):
            found.append(f"function {node.name}")
        elif isinstance(node, ast.ClassDef):
            words = {word.lower() for word in re.findall("[A-Z][a-z]+", node.name)}
            found += [f"class {node.name}"] if words & VAGUE_CLASS_WORDS else []
    return found


def _dotted(node: ast.expr | None) -> str:
    """Return `np.random.rand` for such a chain of attributes, the empty text for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = _dotted(node.value)
        return f"{base}.{node.attr}" if base else ""
    return ""


def worldly(tree: ast.Module) -> list[str]:
    """Return input, output, clocks and randomness that are not arguments."""
    found = [f"line {line} imports {name}" for line, name in imported(tree) if name in WORLDLY_MODULES]
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = _dotted(node.func)
            drawn_from_the_machine = name.split(".")[-1] in SEEDED and not node.args and not node.keywords
            if name in WORLDLY_CALLS or drawn_from_the_machine:
                found.append(f"line {node.lineno} calls {name}()")
        elif isinstance(node, ast.Attribute):
            name = _dotted(node)
            start, _, last = name.rpartition(".")
            if start in ("np.random", "numpy.random") and last not in SEEDED | SEEDED_TYPES:
                found.append(f"line {node.lineno} uses {name}")
    return found


JIT_MARKS = {
    node.name
    for node in parsed(SOURCES / "_jit.py").body
    if isinstance(node, ast.FunctionDef) and not node.name.startswith("_") and _dotted(node.returns) == "F"
}
"""The decorators of `_jit`: its public functions that return the function they are given."""


def path_openers(tree: ast.Module) -> list[str]:
    """Return the calls that open, read or write a file by its path."""
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        if isinstance(node.func, ast.Name):
            opens = node.func.id == "open"
        elif isinstance(node.func, ast.Attribute) and node.func.attr == "open":
            # `path.open("rb")` and `path.open()`, but not `dispatcher.open(request)`.
            modes = [*node.args, *(word.value for word in node.keywords if word.arg == "mode")]
            options = {word.arg for word in node.keywords} <= {"mode", "encoding", "newline", "errors", "buffering"}
            opens = _dotted(node.func) in ("os.open", "gzip.open", "io.open") or (
                options and all(isinstance(mode, ast.Constant) and isinstance(mode.value, str) for mode in modes[:1])
            )
        else:
            opens = isinstance(node.func, ast.Attribute) and node.func.attr in PATH_CALLS
        if opens:
            found.append(f"line {node.lineno} opens a path")
    return found


def is_jitted(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef) and any(
        isinstance(mark, ast.Name) and mark.id in JIT_MARKS for mark in node.decorator_list
    )


def jitted(tree: ast.Module) -> list[ast.FunctionDef]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and is_jitted(node)]


def public_methods(cls: ast.ClassDef) -> dict[str, Function]:
    return {node.name: node for node in cls.body if isinstance(node, Function) and not node.name.startswith("_")}


@cache
def promises() -> dict[str, tuple[frozenset[str], bool]]:
    """Return the documented public methods of each class of the package, and whether it is a protocol."""
    return {
        node.name: (
            frozenset(name for name, method in public_methods(node).items() if ast.get_docstring(method)),
            any("Protocol" in ast.unparse(base) for base in node.bases),
        )
        for path in modules()
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.ClassDef)
    }


def promised(cls: ast.ClassDef) -> frozenset[str]:
    """Return the methods that a class need not document: those of its bases, and of protocols that it has whole."""
    bases, own = {ast.unparse(base) for base in cls.bases}, public_methods(cls).keys()
    return frozenset().union(
        *(
            methods
            for name, (methods, is_protocol) in promises().items()
            if name in bases or (is_protocol and name != cls.name and methods and methods <= own)
        )
    )


def undocumented(tree: ast.Module) -> list[str]:
    """Return the public names, and the compiled functions, that have no docstring, nor one in what they implement."""
    found = [] if ast.get_docstring(tree) else ["the module itself"]

    def look(body: list[ast.stmt], owner: str, known: frozenset[str] = frozenset()) -> None:
        for node in body:
            if not isinstance(node, Function | ast.ClassDef):
                continue
            public = not node.name.startswith("_")
            if (public or is_jitted(node)) and not ast.get_docstring(node) and node.name not in known:
                found.append(f"{owner}{node.name}")
            if public and isinstance(node, ast.ClassDef):
                silent = any(not ast.get_docstring(method) for method in public_methods(node).values())
                look(node.body, f"{node.name}.", promised(node) if silent else frozenset())

    look(tree.body, "")
    return found


def _root(node: ast.expr) -> str:
    """Return the variable that a chain of attributes and subscripts starts from."""
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def writes_to_an_argument(function: ast.FunctionDef) -> bool:
    """Return whether it assigns to an element of an argument's array, directly or through a local name for it."""
    owned = {argument.arg for argument in function.args.args}
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Attribute | ast.Subscript):
            owned |= {t.id for t in node.targets if isinstance(t, ast.Name) and _root(node.value) in owned}
    targets: list[ast.expr] = []
    for node in ast.walk(function):
        if isinstance(node, ast.Assign):
            targets += node.targets
        elif isinstance(node, ast.AugAssign):
            targets.append(node.target)
    return any(isinstance(target, ast.Subscript) and _root(target) in owned for target in targets)


def silent_writers(tree: ast.Module) -> list[str]:
    """Return the public compiled functions that write to an argument and do not say so."""
    return [
        f"{function.name} (line {function.lineno})"
        for function in jitted(tree)
        if not function.name.startswith("_")
        and writes_to_an_argument(function)
        and "Mutates:" not in (ast.get_docstring(function) or "")
    ]


def raising_kernels(tree: ast.Module) -> list[str]:
    """Return the compiled functions that raise; they return a status, and the shell around them raises."""
    return [
        function.name
        for function in jitted(tree)
        if any(isinstance(node, ast.Raise | ast.Assert | ast.Try) for node in ast.walk(function))
    ]


def unclaimed_tests(tree: ast.Module) -> list[str]:
    return [
        node.name
        for node in ast.walk(tree)
        if isinstance(node, Function) and node.name.startswith("test_") and not ast.get_docstring(node)
    ]


def test_modules_stay_short() -> None:
    """A module would have outgrown what a reader takes in at once."""
    lengths = {str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines()) for path in modules()}
    assert {name: length for name, length in lengths.items() if length > MOST_LINES} == {}


def test_module_names_say_what_is_inside() -> None:
    """A module or package would have a name under which anything could be put."""
    vague = [
        str(path.relative_to(ROOT))
        for path in modules()
        if VAGUE_WORDS & {word for part in path.relative_to(SOURCES).with_suffix("").parts for word in part.split("_")}
    ]
    assert vague == []


@pytest.mark.parametrize(
    ("check", "packages"),
    [
        pytest.param(vague_names, (), id="names say what is done"),
        pytest.param(undocumented, (), id="public names are documented"),
        pytest.param(silent_writers, COMPILED, id="writers say what they mutate"),
        pytest.param(raising_kernels, COMPILED, id="kernels return status codes"),
    ],
)
def test_law_holds(check: Check, packages: tuple[str, ...]) -> None:
    """The sources would break a law of ARCHITECTURE.md."""
    assert violations(check, modules(*packages)) == []


def test_the_centre_does_no_input_or_output_and_reads_no_clock() -> None:
    """A simulation would depend on more than its arguments."""
    assert violations(worldly, centre()) == []


def test_only_the_jit_module_and_the_kernels_import_numba() -> None:
    """Numba would be configured, and its cache keyed, in more than one place."""
    assert (
        violations(numba_imports, [path for path in modules() if path.name != "_jit.py" and path.parent != KERNELS])
        == []
    )


def test_only_listed_packages_open_paths() -> None:
    """A file would be read or written where nobody looks for its format."""
    others = [path for path in modules() if path.relative_to(SOURCES).parts[0] not in OPEN_PATHS]
    assert violations(path_openers, others) == []


def test_every_decorator_of_the_jit_module_is_known() -> None:
    """The laws for compiled functions would not see those compiled by one of the decorators."""
    assert {"jit", "jit_inline", "jit_part"} <= JIT_MARKS


@pytest.mark.parametrize(
    ("check", "wrong", "right"),
    [
        (path_openers, "text = path.read_text()", "text = reader.text()"),
        (path_openers, "path.open('rb')", "dispatcher.open(request)"),
        (path_openers, "path.open(encoding='utf-8')", "breaker.open(now_s=1.0)"),
        (path_openers, "open(path)", "opened(path)"),
        (numba_imports, "def f():\n    from numba.core import types", "from phasesplit._jit import jit"),
        (vague_names, "def _process_batch(): ...", "def processed(): ..."),
        (vague_names, "class PoolHelpers: ...", "class PoolManager: ..."),
        (worldly, "def f():\n    import time", "from phasesplit.domain import link"),
        (worldly, "text = open('x').read()", "text = opened('x')"),
        (worldly, "x = np.random.rand(3)", "x = rng.random(3)"),
        (worldly, "np.random.seed(0)", "rng = np.random.default_rng(seed)"),
        (worldly, "rng = np.random.default_rng()", "def f(rng: np.random.Generator): ..."),
        (undocumented, '"""M."""\nclass A:\n    """A."""\n    def b(self): ...', '"""M."""\ndef _a(): ...'),
        (undocumented, '"""M."""\n@jit\ndef _a(): ...', '"""M."""\n@jit\ndef _a():\n    """A."""'),
        (undocumented, "x = 1", '"""M."""'),
        (
            undocumented,
            '"""M."""\nclass A:\n    """A."""\n    def now_s(self): ...\n    async def sleep(self): ...',
            '"""M."""\nclass A(Clock):\n    """A."""\n    def now_s(self): ...',
        ),
        (silent_writers, "@jit\ndef f(a):\n    a.b['c'][0] = 1", "@jit\ndef f(a):\n    b = [0]\n    b[0] = a"),
        (silent_writers, "@jit_inline\ndef f(a):\n    b = a.c\n    b[0] += 1", "def f(a):\n    a[0] = 1"),
        (
            silent_writers,
            "@jit\ndef f(a):\n    a[0] = 1",
            '@jit\ndef f(a):\n    """F.\n\n    Mutates: a.\n    """\n    a[0] = 1',
        ),
        (silent_writers, "@jit_part\ndef f(a):\n    a[0] = 1", "@jit_part\ndef _f(a):\n    a[0] = 1"),
        (raising_kernels, "@jit_part\ndef f(a):\n    assert a", "@partial\ndef f(a):\n    assert a"),
        (raising_kernels, "@jit\ndef f(a):\n    raise ValueError", "def f(a):\n    raise ValueError"),
        (unclaimed_tests, "def test_a(): ...", 'def test_a():\n    """A."""'),
    ],
)
def test_checks_can_fail(check: Check, wrong: str, right: str) -> None:
    """A law would pass because its check sees nothing, or bind what it does not forbid."""
    assert check(ast.parse(wrong)) != []
    assert check(ast.parse(right)) == []


def test_every_package_has_its_tests() -> None:
    """A package with code would have no folder of tests under its own name."""
    packages = {path.relative_to(SOURCES).parts[0] for path in modules() if path.parent != SOURCES}
    with_code = {name for name in packages if len(list((SOURCES / name).rglob("*.py"))) > 1}
    tested = {path.parent.name for path in (ROOT / "tests").glob("*/test_*.py")}
    assert with_code - tested == set()


def test_every_test_says_what_would_be_wrong() -> None:
    """A failing test would leave its reader to guess what it protects."""
    assert violations(unclaimed_tests, sorted((ROOT / "tests").rglob("test_*.py"))) == []


def test_architecture_names_every_module_of_the_centre() -> None:
    """The layout in ARCHITECTURE.md would be that of an earlier tree."""
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    layout = set(re.findall(r"\w+", text.partition("## Layout")[2].partition("## Laws")[0]))
    assert {path.stem for path in centre()} - {"__init__"} - layout == set()


@pytest.mark.parametrize("page", DOCUMENTS, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_documents_lead_somewhere(page: Path) -> None:
    """A reader would follow a link to a file that is not there."""
    targets = re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8"))
    local = [target for target in targets if "://" not in target]
    assert [target for target in local if not (page.parent / target).exists()] == []


def test_no_file_names_a_path_of_one_machine() -> None:
    """A file would mean something only on the machine where it was written."""
    wanted = [ROOT / name for name in PROJECT_TEXT] + sorted(ROOT.glob("*.md"))
    files = [path for top in wanted if top.exists() for path in (top.rglob("*") if top.is_dir() else (top,))]
    named = [
        str(path.relative_to(ROOT))
        for path in files
        if path.is_file()
        and not any(part == "__pycache__" or part.endswith("_cache") for part in path.parts)
        and MACHINE_PATH.search(path.read_text(encoding="utf-8", errors="ignore"))
    ]
    assert named == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (f"see /{'work'}/main/README.md", True),
        (f"'/{'home'}/ann/trace.csv'", True),
        ("../shared/data", False),
        ("https://example.org/work/1", False),
    ],
)
def test_machine_paths_are_recognised(text: str, found: bool) -> None:
    """A path of one machine would pass unseen, or a web address be taken for one."""
    assert bool(MACHINE_PATH.search(text)) == found
