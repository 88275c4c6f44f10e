"""The published study's materials, and its outcome as something that JSON can hold."""

from typing import Any

from phasesplit._version import __version__
from phasesplit.files.catalog import phase_times
from phasesplit.files.specs import load_machine, load_model
from phasesplit.files.workloads import load_workload
from phasesplit.planning.ladder import MACHINES, Rung, Stock
from phasesplit.planning.paper import CONTRADICTIONS, TAGS
from phasesplit.planning.reproduction import Findings
from phasesplit.planning.study import BLOOM, CODING, CONVERSATION, LLAMA
from phasesplit.planning.study_parts import Part, parts
from phasesplit.planning.study_rows import Row


def load_stock() -> Stock:
    """Return the models, machines, workloads and phase times of the published study, all of them shipped."""
    models = {name: load_model(name) for name in (BLOOM, LLAMA)}
    machines = {name: load_machine(name) for name in MACHINES}
    pairs = [(model, machine) for model in models for machine in machines]
    return Stock(
        models=models,
        machines=machines,
        workloads={name: load_workload(name) for name in (CODING, CONVERSATION)},
        right={(model, name): phase_times(models[model], machines[name]) for model, name in pairs},
        published={(model, name): phase_times(models[model], machines[name], published=True) for model, name in pairs},
    )


def reproduction_summary(found: Findings, elapsed_s: float) -> dict[str, Any]:
    """Return the study's outcome as something that JSON can hold; what has no value is not a number.

    Args:
        found: The outcome.
        elapsed_s: How long it took.
    """
    return {
        "version": __version__,
        "seeds": list(found.bench.seeds),
        "duration_s": found.bench.duration_s,
        "rungs": {rung.name.lower(): rung.label for rung in Rung},
        "sources": TAGS,
        "parts": [_part(part) for part in parts(found)],
        "contradictions": [contradiction._asdict() for contradiction in CONTRADICTIONS],
        "simulations": found.questions,
        "elapsed_s": elapsed_s,
    }


def _part(part: Part) -> dict[str, Any]:
    return {"title": part.title, "unit": part.unit, "rows": [_row(row) for row in part.rows]}


def _row(row: Row) -> dict[str, Any]:
    published = row.published
    return {
        "what": row.what,
        "published": {"text": published.text, "number": published.number, "source": published.tag or None},
        "ours": {rung.name.lower(): cell._asdict() for rung, cell in row.ours.items()},
        "why": list(row.why),
        "ladder": {rung.name.lower(): number for rung, number in row.ladder.items()},
    }
