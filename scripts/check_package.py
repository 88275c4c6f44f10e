"""Build sdist and wheel, install the wheel as a user would, and run it; what `make test-package` does.

The wheel is built from the sdist, so that one is complete too. Dependencies come as wheels or not at all: no compiler
can have been needed. Prints what is downloaded, how much it takes on disk, and how long it took.
"""

import argparse
import re
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MOST_ON_DISK_MB, MOST_PROCESSOR_S = 500.0, 60.0
MUST_HAVE = (
    "phasesplit/py.typed",
    "phasesplit/profiles/machines/dgx-h100.yaml",
    "phasesplit/profiles/models/llama-3.1-70b.yaml",
    "phasesplit/profiles/phase_times/measured.csv",
    "phasesplit/profiles/workloads/azure-conversation.npz",
    "phasesplit/engine/kernels/tiles.py",
    "phasesplit/report/templates/page.html",
    "phasesplit/vllm/connector.py",
)
NOT_OURS = re.compile(r"(^|/)(tests?|docs|bench|scripts|__pycache__|\.[^/]+)(/|$)|\.pyc$")
SDIST_MUST_HAVE = ("Makefile", "CHANGELOG.md", "LICENSE", "NOTICE", "docs/model.md", "tests/test_architecture.py")
FORBIDDEN = ("torch", "vllm", "ray", "pandas", "pyarrow", "zstandard", "setuptools-rust")
SIZE = re.compile(r"(?:Downloading|Using cached) (\S+\.whl)\S* \((\d+(?:\.\d+)?) (kB|MB|GB)\)")
LOCAL = re.compile(r"Processing (\S+\.whl)")
IN_MB = {"kB": 1e-3, "MB": 1.0, "GB": 1e3}
SIMULATE = ("simulate", "--model", "llama-3.1-8b", "--pool", "prefill:1:dgx-a100", "--pool", "decode:1:dgx-a100",
            "--workload", "azure-coding", "--rate", "1", "--count", "20")  # fmt: skip


def main() -> None:
    """Build, look, install, run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keep", type=Path, help="directory to put sdist and wheel into")
    kept = parser.parse_args().keep
    with tempfile.TemporaryDirectory(prefix="phasesplit-package-") as scratch:
        place = Path(scratch)
        sdist, wheel = built(place)
        check_contents(sdist, wheel)
        if kept is not None:
            kept.mkdir(parents=True, exist_ok=True)
            for made in (sdist, wheel):
                (kept / made.name).write_bytes(made.read_bytes())
        check_installed(wheel, place)
    print("the package is sound")


def built(place: Path) -> tuple[Path, Path]:
    """Build the sdist from this tree and the wheel from the sdist; return both."""
    python = environment(place / "build")
    run(python, "-m", "pip", "install", "--quiet", "hatchling>=1.25")
    run(python, "-m", "hatchling", "build", "-t", "sdist", "-d", str(place), cwd=ROOT)
    (sdist,) = place.glob("*.tar.gz")
    run(python, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(place), str(sdist))
    (wheel,) = place.glob("*.whl")
    return sdist, wheel


def check_contents(sdist: Path, wheel: Path) -> None:
    """Stop where a file is missing, or one is there that should not be."""
    with zipfile.ZipFile(wheel) as archive:
        inside = archive.namelist()
    ours = {str(path.relative_to(ROOT / "src")) for path in (ROOT / "src").rglob("*") if path.is_file()}
    ours = {path for path in ours if not NOT_OURS.search(path)}
    wanted = ours | set(MUST_HAVE)
    stop_at("not in the wheel", sorted(wanted - set(inside)))
    strange = [name for name in inside if name not in wanted and ".dist-info/" not in name]
    stop_at("in the wheel, and not of the package", strange)
    with tarfile.open(sdist) as archive:
        sources = {name.partition("/")[2] for name in archive.getnames()}
    stop_at("not in the sdist", sorted({*SDIST_MUST_HAVE, *(f"src/{path}" for path in ours)} - sources))
    print(f"wheel: {len(inside)} files, {wheel.stat().st_size / 1e6:.2f} MB; sdist: {len(sources)} files, "
          f"{sdist.stat().st_size / 1e6:.2f} MB")  # fmt: skip


def check_installed(wheel: Path, place: Path) -> None:
    """Install the wheel into an environment of its own, say what that took, and run some commands."""
    python = environment(place / "user")
    before_mb = on_disk_mb(place / "user")
    began_s, cpu_s = time.monotonic(), children_cpu_s()
    said = run(python, "-m", "pip", "install", "--only-binary=:all:", "--progress-bar=off", str(wheel))
    took_s, cpu_s = time.monotonic() - began_s, children_cpu_s() - cpu_s
    downloaded_mb = sum(downloads_mb(said))
    disk_mb, bytecode_mb = on_disk_mb(place / "user") - before_mb, on_disk_mb(place / "user", "__pycache__/*.pyc")
    print(f"installed in {took_s:.0f} s ({cpu_s:.0f} s of a processor): {downloaded_mb:.0f} MB of wheels, "
          f"{disk_mb:.0f} MB on disk ({bytecode_mb:.0f} MB of them bytecode)")  # fmt: skip
    names = {line.partition("==")[0].lower() for line in run(python, "-m", "pip", "freeze").splitlines()}
    stop_at("installed without being asked for", sorted(names & set(FORBIDDEN)))
    if disk_mb > MOST_ON_DISK_MB or cpu_s > MOST_PROCESSOR_S:
        sys.exit(f"more than {MOST_ON_DISK_MB:.0f} MB on disk or {MOST_PROCESSOR_S:.0f} s of a processor")
    command = str(python.parent / "phasesplit")
    version = run(command, "--version", cwd=place).strip()
    if not re.fullmatch(r"phasesplit \d+\.\d+\.\d+\S*", version):
        sys.exit(f"phasesplit --version says {version!r}")
    report = run(command, *SIMULATE, cwd=place)
    if "20 requests" not in report:
        sys.exit(f"phasesplit simulate says:\n{report}")
    said = run(command, "doctor", cwd=place, may_fail=True)
    if "packages         all" not in said or "Traceback" in said:
        sys.exit(f"phasesplit doctor says:\n{said}")
    check_without_extras(command, place)
    print(f"{version} runs from the wheel: --version, simulate, doctor, trace")


def check_without_extras(command: str, place: Path) -> None:
    """Stop unless CSV is read and written, and what needs an extra names it in one line and leaves nothing."""
    (place / "mine.csv").write_text("arrival_s,prompt_tokens,output_tokens\n0.5,100,20\n")
    run(command, "trace", "convert", "mine.csv", "again.csv.gz", cwd=place)
    run(command, "trace", "convert", "again.csv.gz", "again.csv", cwd=place)
    if (place / "again.csv").read_bytes() != (place / "mine.csv").read_bytes():
        sys.exit("a trace in CSV is not what it was after it was compressed and read again")
    run(command, *SIMULATE, "--requests", "rows.csv", "--html", "page.html", "--figure", "page.png", cwd=place)
    for arguments, made, extra in (
        (("trace", "convert", "mine.csv", "mine.parquet"), "mine.parquet", "parquet"),
        (("trace", "convert", "mine.csv", "mine.csv.zst"), "mine.csv.zst", "zstd"),
        ((*SIMULATE, "--requests", "rows.parquet"), "rows.parquet", "parquet"),
    ):
        done = subprocess.run([command, *arguments], cwd=place, capture_output=True, text=True)  # noqa: S603
        said = done.stderr.strip()
        is_told = done.returncode == 2 and len(said.splitlines()) == 1 and f"'phasesplit[{extra}]'" in said
        if not is_told or (place / made).exists():
            sys.exit(f"phasesplit {' '.join(arguments)}: exit code {done.returncode}\n{said}")


def downloads_mb(said: str) -> Iterator[float]:
    """Yield the size of each wheel that pip took, whether from the index, its cache or a directory."""
    for _, number, unit in SIZE.findall(said):
        yield float(number) * IN_MB[unit]
    for path in LOCAL.findall(said):
        yield Path(path).stat().st_size / 1e6 if Path(path).is_file() else 0.0


def environment(path: Path) -> Path:
    """Make a virtual environment; return its Python."""
    run(sys.executable, "-m", "venv", str(path))
    return path / "bin" / "python"


def on_disk_mb(path: Path, pattern: str = "*") -> float:
    """Return how much the files under a directory take, in MB."""
    return sum(file.lstat().st_size for file in path.rglob(pattern) if file.is_file() and not file.is_symlink()) / 1e6


def children_cpu_s() -> float:
    """Return how long the processes that this one has waited for have computed."""
    import resource

    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def stop_at(what: str, names: Sequence[str]) -> None:
    """End with what is wrong, if anything is."""
    if names:
        sys.exit(f"{what}: {', '.join(names[:10])}{' ...' if len(names) > 10 else ''}")


def run(program: Path | str, *arguments: str, cwd: Path | None = None, may_fail: bool = False) -> str:
    """Run a program; return what it prints, or end with that where it fails."""
    done = subprocess.run([str(program), *arguments], cwd=cwd, capture_output=True, text=True)  # noqa: S603
    if done.returncode and not may_fail:
        sys.exit(f"{program} {' '.join(arguments)}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    main()
