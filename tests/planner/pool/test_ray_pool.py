"""Questions answered on a real Ray cluster on this machine; what needs none of it runs without Ray."""

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import CancelledError
from pathlib import Path
from types import SimpleNamespace

import pytest

from phasesplit.errors import SpecError, WorkerLostError
from phasesplit.planner.pool import open_pool
from planner.pool import answers
from planner.pool.left_over import marked, new_mark, none_left

HAS_RAY = importlib.util.find_spec("ray") is not None
needs_ray = pytest.mark.skipif(not HAS_RAY, reason="needs the extra `ray`")
TESTS = Path(__file__).parents[2]
TIMEOUT_S = 60
RAY_SETTINGS = {
    "PYTHONPATH": str(TESTS),
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # servers on the loopback interface only
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": uuid.uuid4().hex * 2,
}
# Ray's own threads and files outlive its shutdown a little.
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


CLUSTER = (
    "import ray, sys\n"
    "context = ray.init(address='local', num_cpus=2, include_dashboard=False, _node_ip_address='127.0.0.1',\n"
    "                   object_store_memory=100 << 20, logging_level='ERROR', log_to_driver=False)\n"
    "print(context.address_info['gcs_address'], flush=True)\n"
    "sys.stdin.read()\n"
)


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """The address of a cluster of two CPUs, bound to this machine, that ends with the module."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in RAY_SETTINGS.items():
            patch.setenv(name, value)
        with subprocess.Popen(
            [sys.executable, "-c", CLUSTER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as owner:
            assert owner.stdin is not None
            assert owner.stdout is not None
            yield owner.stdout.readline().strip()
            owner.stdin.close()
            owner.wait(TIMEOUT_S)


def test_ray_that_is_absent_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks for a cluster without Ray would get a traceback instead of the command that installs it."""
    monkeypatch.setitem(sys.modules, "ray", None)
    with (
        pytest.raises(SpecError, match=r"Ray is not installed: pip install 'phasesplit\[ray\]'"),
        open_pool(answers.square, ray_address="auto"),
    ):
        pass


def test_what_ray_says_of_a_cluster_becomes_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster of another version of Ray or Python would be reported over many lines, or as a bug of phasesplit."""

    def init(**_options: object) -> None:
        raise RuntimeError(
            "Version mismatch: The cluster was started with:\n    Ray: 1.0\nThis process was started with:"
        )

    ray = SimpleNamespace(is_initialized=lambda: False, init=init, shutdown=lambda: None)
    monkeypatch.setitem(sys.modules, "ray", ray)
    before = dict(os.environ)
    with pytest.raises(SpecError) as caught, open_pool(answers.square, ray_address="auto"):
        pass
    assert str(caught.value) == (
        "address of the Ray cluster: cannot use 'auto' "
        "(Version mismatch: The cluster was started with: Ray: 1.0 This process was started with:)"
    )
    assert dict(os.environ) == before


@pytest.mark.parametrize("address", ["here", "ray://host:10001", "host", "host:port", ""])
def test_text_that_is_no_address_is_refused(address: str) -> None:
    """Ray would try for minutes to reach what is no address."""
    with (
        pytest.raises(SpecError, match=r"address of the Ray cluster: got .*, allowed is HOST:PORT, 'auto' or 'local'"),
        open_pool(answers.square, ray_address=address),
    ):
        pass


def test_an_address_where_nobody_listens_is_refused_soon() -> None:
    """A wrong port would cost two minutes, and then the process with all it has found."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        with (
            pytest.raises(SpecError, match=r"nobody listens at 127\.0\.0\.1"),
            open_pool(answers.square, ray_address=address),
        ):
            pass


@needs_ray
def test_an_address_where_something_else_listens_is_refused_within_seconds() -> None:
    """A web server's port would hang the search, or end the process with all it has found."""
    text = (
        "from phasesplit.errors import SpecError\n"
        "from phasesplit.planner.pool import open_pool\n"
        "from planner.pool.answers import square\n"
        "import sys\n"
        "try:\n"
        "    with open_pool(square, ray_address=sys.argv[1]): pass\n"
        "except SpecError as problem:\n"
        "    print(problem)\n"
    )
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        command = [sys.executable, "-c", text, f"127.0.0.1:{mute.getsockname()[1]}"]
        ran = subprocess.run(
            command, env={**os.environ, **RAY_SETTINGS}, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    assert ran.stdout.startswith("address of the Ray cluster: cannot use")
    assert ran.stdout.count("\n") == 1


@needs_ray
def test_answers_are_those_of_the_function(cluster: str) -> None:
    """A plan would depend on where its simulations ran, or a cluster leave all but one CPU idle."""
    with open_pool(answers.square_and_pid, ray_address=cluster) as workers:
        assert workers.width == 2
        for _ in range(20):  # one worker may start late
            found = [future.result(TIMEOUT_S) for future in [workers.submit(n) for n in range(40)]]
            assert [square for square, _ in found] == [n * n for n in range(40)]
            pids = {pid for _, pid in found}
            if len(pids) == 2:
                break
    assert len(pids) == 2
    assert os.getpid() not in pids


@needs_ray
def test_fewer_workers_than_the_cluster_has_cpus(cluster: str) -> None:
    """A cluster that is shared could not be used in part."""
    with open_pool(answers.square, count=1, ray_address=cluster) as workers:
        assert workers.width == 1
        assert workers.submit(5).result(TIMEOUT_S) == 25


@needs_ray
def test_errors_of_the_answer_reach_who_asked(cluster: str) -> None:
    """A refusal with its one line would become an error of Ray's with a page of traceback."""
    with open_pool(answers.misbehave, ray_address=cluster) as workers:
        problem = workers.submit("refuse").exception(TIMEOUT_S)
        assert workers.submit("well").result(TIMEOUT_S) == "well"
    assert isinstance(problem, SpecError)
    assert str(problem) == "this is not allowed"
    assert "in misbehave" in "".join(problem.__notes__)


@needs_ray
def test_a_question_survives_the_loss_of_its_worker(cluster: str, tmp_path: Path) -> None:
    """A night's search on a cluster would be lost with one node."""
    with open_pool(answers.DieOnce(tmp_path / "marker"), ray_address=cluster) as workers:
        assert workers.submit(4).result(TIMEOUT_S) == 16
    assert (tmp_path / "marker").exists()


@needs_ray
def test_a_question_that_ends_every_worker_fails(cluster: str) -> None:
    """A question that needs more memory than a node has would be asked for ever."""
    with (
        open_pool(answers.misbehave, ray_address=cluster) as workers,
        pytest.raises(WorkerLostError, match="a worker on the Ray cluster was lost"),
    ):
        workers.submit("kill").result(TIMEOUT_S)


@needs_ray
def test_closing_ends_at_once_what_is_asked(cluster: str) -> None:
    """Ctrl-C would be followed by a wait for questions that nobody needs any more, or leave the CPUs taken."""
    with open_pool(answers.sleep, ray_address=cluster) as workers:
        workers.submit(0.0).result(TIMEOUT_S)
        futures = [workers.submit(6000.0) for _ in range(10)]
        time.sleep(0.2)
    for future in futures:
        with pytest.raises(CancelledError):
            future.result(0)
    with open_pool(answers.square, ray_address=cluster) as workers:
        assert workers.width == 2


LOCAL = (
    "import signal\n"
    "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # as in test_workers
    "from phasesplit.planner.pool import open_pool\n"
    "from planner.pool.answers import sleep\n"
    "try:\n"
    "    with open_pool(sleep, count=2, ray_address='local') as workers:\n"
    "        print(workers.width, workers.submit(0.25).result(), flush=True)\n"
    "        workers.submit({seconds}).result()\n"
    "except KeyboardInterrupt:\n"
    "    print('interrupted', flush=True)\n"
)


@needs_ray
@pytest.mark.parametrize("interrupted", [False, True])
def test_a_local_cluster_says_nothing_and_leaves_nothing(interrupted: bool, tmp_path: Path) -> None:
    """Ray's servers, their logs or a token would stay behind on the person's machine, or a log stand in the output."""
    mark = new_mark()
    with tempfile.TemporaryDirectory(prefix="r") as temporary:  # sockets in it have a limit on the length of their path
        places = {"HOME": str(tmp_path), "TMPDIR": temporary}
        environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        ends_well(interrupted, mark, {**environment, "PYTHONPATH": str(TESTS), **places, **mark})
        assert list(Path(temporary).iterdir()) == []
    assert list(tmp_path.iterdir()) == []


def ends_well(interrupted: bool, mark: dict[str, str], environment: dict[str, str]) -> None:
    command = [sys.executable, "-c", LOCAL.format(seconds=60.0 if interrupted else 0.0)]
    with subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "2 0.25\n"
        if interrupted:
            assert len(marked(mark)) > 2
            os.killpg(parent.pid, signal.SIGINT)
        output, errors = parent.communicate(timeout=TIMEOUT_S)
    assert (output, errors) == ("interrupted\n" if interrupted else "", "")
    assert none_left(mark)


@needs_ray
def test_a_second_local_cluster_of_a_process_works_like_the_first() -> None:
    """Whoever makes two plans in one program would be refused by the second cluster, which knows another token."""
    text = (
        "import os\n"
        "from phasesplit.planner.pool import open_pool\n"
        "from planner.pool.answers import square\n"
        "for number in (2, 3):\n"
        "    with open_pool(square, count=1, ray_address='local') as workers:\n"
        "        print(workers.submit(number).result())\n"
        "print(os.environ.get('RAY_AUTH_MODE'))\n"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    ran = subprocess.run(
        [sys.executable, "-c", text],
        env={**environment, "PYTHONPATH": str(TESTS)},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert (ran.stdout, ran.stderr) == ("4\n9\nNone\n", "")
