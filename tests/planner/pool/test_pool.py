"""Questions answered in this process and in others: the answers, the errors, and the end."""

import os
import pickle
import signal
import subprocess
import sys
from concurrent.futures import CancelledError, wait
from importlib.util import find_spec
from multiprocessing import active_children
from pathlib import Path

import pytest

from phasesplit.errors import SimulationError, SpecError, WorkerLostError
from phasesplit.planner.pool import open_pool, processes
from planner.pool import answers
from planner.pool.left_over import marked, new_mark, none_left
from refusals import assert_refused

TIMEOUT_S = 60
TESTS = Path(__file__).parents[2]


def script(tmp_path: Path, text: str) -> list[str]:
    """Return the command that runs a script which can import the answers."""
    path = tmp_path / "script.py"
    path.write_text(f"import sys\nsys.path.append({str(TESTS)!r})\n{text}", encoding="utf-8")
    return [sys.executable, str(path)]


@pytest.mark.parametrize("count", [1, 3])
def test_answers_are_those_of_the_function(count: int) -> None:
    """A plan would depend on where its simulations ran."""
    with open_pool(answers.square, count=count) as workers:
        assert workers.width == count
        assert [workers.submit(n).result(TIMEOUT_S) for n in range(30)] == [n * n for n in range(30)]


@pytest.mark.parametrize("module", processes._PRELOADED)
def test_a_module_that_is_loaded_before_processes_start_exists(module: str) -> None:
    """Every process would import the simulator for itself: the standard library ignores a name that is not there."""
    assert find_spec(module) is not None


def test_one_worker_is_this_process() -> None:
    """A plan on one core would pay for a second process, or return before it has answered."""
    with open_pool(answers.square_and_pid, count=1) as workers:
        future = workers.submit(3)
        assert future.done()
        assert future.result() == (9, os.getpid())


def test_questions_are_spread_over_processes() -> None:
    """A second core would stay idle."""
    with open_pool(answers.square_and_pid, count=2) as workers:
        # One worker may start late; two that are at work share what there is.
        for _ in range(20):
            pids = {workers.submit(n).result(TIMEOUT_S)[1] for n in range(2)}
            found = {future.result(TIMEOUT_S)[1] for future in [workers.submit(n) for n in range(10)]} | pids
            if len(found) == 2:
                break
    assert len(found) == 2
    assert os.getpid() not in found


def test_answer_travels_once_and_keeps_what_it_cached(tmp_path: Path) -> None:
    """A megabyte of workload would be sent, and its traces drawn again, with every question."""
    log = tmp_path / "log"
    with open_pool(answers.Counted(log), count=2) as workers:
        counts = [future.result(TIMEOUT_S) for future in [workers.submit(n) for n in range(30)]]
    loads = log.read_text(encoding="ascii").split()
    assert len(loads) == len(set(loads)) <= 2
    assert sorted(counts) == sorted([*range(1, max(counts) + 1), *range(1, 30 - max(counts) + 1)])


@pytest.mark.parametrize("count", [1, 2])
def test_errors_of_the_answer_reach_who_asked(count: int) -> None:
    """A refusal with its one line would become a bug, or the worker be lost by it."""
    with open_pool(answers.misbehave, count=count) as workers:
        with pytest.raises(SpecError) as caught:
            workers.submit("refuse").result(TIMEOUT_S)
        assert str(caught.value) == "this is not allowed"
        assert workers.submit("well").result(TIMEOUT_S) == "well"


def test_an_error_tells_where_in_the_worker_it_arose() -> None:
    """A bug met in a worker could not be found: the traceback would end at the parent's queue."""
    with open_pool(answers.misbehave, count=2) as workers:
        problem = workers.submit("refuse").exception(TIMEOUT_S)
    assert "in misbehave" in "".join(getattr(problem, "__notes__", []))


def test_what_cannot_travel_is_an_error_of_its_question_only() -> None:
    """An exception or value that cannot be pickled would hang the question, or take the other ones with it."""
    with open_pool(answers.misbehave, count=2) as workers:
        with pytest.raises(SimulationError, match="Awkward: trouble at home"):
            workers.submit("awkward").result(TIMEOUT_S)
        assert isinstance(workers.submit("unpicklable").exception(TIMEOUT_S), pickle.PicklingError | AttributeError)
        assert isinstance(workers.submit(lambda: None).exception(TIMEOUT_S), pickle.PicklingError | AttributeError)  # type: ignore[arg-type]
        assert workers.submit("well").result(TIMEOUT_S) == "well"


@pytest.mark.parametrize(
    ("how", "reason"), [("kill", r"ended by signal 9 \(Killed\); perhaps memory ran out"), ("exit", "exit status 3")]
)
def test_a_process_that_is_lost_fails_every_question(how: str, reason: str) -> None:
    """A search would wait for ever for a process that the system killed for its memory."""
    with open_pool(answers.misbehave, count=2) as workers:
        futures = [workers.submit(question) for question in [how, *["well"] * 50]]
        assert not wait(futures, TIMEOUT_S).not_done
        with pytest.raises(WorkerLostError, match=reason):
            futures[0].result()
        with pytest.raises(WorkerLostError, match=reason):
            workers.submit("well").result(TIMEOUT_S)


def test_closing_ends_at_once_what_is_asked(tmp_path: Path) -> None:
    """Ctrl-C would be followed by a wait for questions that nobody needs any more, or leave processes behind."""
    with open_pool(answers.Logged(tmp_path), count=2) as workers:
        workers.submit(0.0).result(TIMEOUT_S)
        futures = [workers.submit(6000.0) for _ in range(10)]
        assert len(active_children()) == 2
    assert list(tmp_path.iterdir()) == [tmp_path / "0.0"]
    for future in [*futures, workers.submit(0.0)]:
        with pytest.raises(CancelledError):
            future.result(0)
    assert active_children() == []


def test_workers_that_were_never_asked_are_closed_as_well(tmp_path: Path) -> None:
    """Workers would stay when a search is over, or interrupted, before they have started."""
    mark = new_mark()
    text = (
        "from phasesplit.planner.pool import open_pool\n"
        "from planner.pool.answers import square\n"
        "with open_pool(square, count=2): pass\n"
        "with open_pool(square, count=2) as workers: workers.submit(2)\n"
    )
    ran = subprocess.run(
        script(tmp_path, text),
        env={**os.environ, **mark},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")
    assert none_left(mark)


def test_a_script_is_not_run_again_by_its_workers(tmp_path: Path) -> None:
    """A script without a guard around its main part would start itself again and again."""
    text = (
        "print('once')\n"
        "from phasesplit.planner.pool import open_pool\n"
        "from planner.pool.answers import square\n"
        "with open_pool(square, count=2) as workers:\n"
        "    print(sum(f.result() for f in [workers.submit(n) for n in range(5)]))\n"
    )
    ran = subprocess.run(script(tmp_path, text), capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert (ran.stdout, ran.stderr) == ("once\n30\n", "")


def test_an_answer_from_the_script_is_refused_in_one_line(tmp_path: Path) -> None:
    """Whoever wrote the answer into the script would see an AttributeError from another process."""
    text = (
        "from phasesplit.planner.pool import open_pool\n"
        "def mine(question): return question\n"
        "with open_pool(mine, count=2) as workers:\n"
        "    print(type(problem := workers.submit(1).exception()).__name__, problem)\n"
    )
    ran = subprocess.run(script(tmp_path, text), capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert ran.stdout.startswith("SpecError workers: the answer cannot be loaded in another process")
    assert "must stand in a module" in ran.stdout
    assert ran.stdout.count("\n") == 1
    assert ran.stderr == ""


def test_what_an_answer_prints_stays_out_of_the_output(tmp_path: Path) -> None:
    """JSON on standard output would have a worker's words in it."""
    text = (
        "from phasesplit.planner.pool import open_pool\n"
        "from planner.pool.answers import say\n"
        "with open_pool(say, count=2) as workers:\n"
        "    workers.submit('from the worker').result()\n"
        "    print('{}')\n"
    )
    ran = subprocess.run(script(tmp_path, text), capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert ran.stdout == "{}\n"


ASKS_FOR_LONG = (
    "import signal\n"
    # A shell without job control starts what runs in the background, such as these tests, deaf to Ctrl-C.
    "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    "from phasesplit.planner.pool import open_pool\n"
    "from planner.pool.answers import sleep\n"
    "with open_pool(sleep, count=2) as workers:\n"
    "    workers.submit(0.0).result()\n"
    "    futures = [workers.submit({seconds}) for _ in range(10)]\n"
    "    try:\n"
    "        print('asked', flush=True)\n"
    "        futures[0].result()\n"
    "    except KeyboardInterrupt:\n"
    "        print('interrupted', flush=True)\n"
)


def test_ctrl_c_is_heard_by_the_parent_only(tmp_path: Path) -> None:
    """Every worker would print a traceback when a person interrupts a search, or stay."""
    mark = new_mark()
    with asking_for_long(tmp_path, 6000.0, mark) as parent:
        os.killpg(parent.pid, signal.SIGINT)
        assert parent.communicate(timeout=TIMEOUT_S) == ("interrupted\n", "")
    assert none_left(mark)


def test_workers_end_with_a_parent_that_was_killed(tmp_path: Path) -> None:
    """Processes of a search that was killed would wait for questions for ever."""
    mark = new_mark()
    with asking_for_long(tmp_path, 0.5, mark) as parent:
        assert len(marked(mark)) >= 3
        parent.kill()
        output, errors = parent.communicate(timeout=TIMEOUT_S)
    assert output == ""
    assert "Traceback" not in errors  # of Python's resource tracker, a warning that it cleans up is right
    assert none_left(mark)


def asking_for_long(tmp_path: Path, seconds: float, mark: dict[str, str]) -> "subprocess.Popen[str]":
    """Return a script, in a process group of its own, whose workers are at questions that take that long each."""
    parent = subprocess.Popen(
        script(tmp_path, ASKS_FOR_LONG.format(seconds=seconds)),
        env={**os.environ, **mark},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert parent.stdout is not None
    assert parent.stdout.readline() == "asked\n"
    return parent


def test_wrong_numbers_and_answers_are_refused() -> None:
    """A wrong count or answer would show itself as an error of Python's own."""
    with pytest.raises(SpecError) as caught:
        open_pool(answers.square, count=0)
    assert_refused(caught.value, "number of workers", "0", "1 or more")
    with pytest.raises(SpecError) as caught:
        open_pool(lambda question: question, count=2)
    assert_refused(caught.value, "cannot be sent", "process")
