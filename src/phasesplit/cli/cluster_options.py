"""The cluster and the rules that a command's options, and perhaps a cluster file, describe."""

from typing import TYPE_CHECKING

from phasesplit.errors import SpecError

if TYPE_CHECKING:
    from phasesplit.domain.cluster import Cluster
    from phasesplit.domain.machine import Machine
    from phasesplit.scheduling.rules import Rules

_RULES = ("default", "published")


def cluster_and_rules(
    file: str | None,
    model: str | None,
    pools: list[str] | None,
    rules_name: str | None,
    settings: list[str],
    *,
    profile: str | None,
    reference: str,
    times: str = "auto",
) -> tuple["Cluster", "Rules"]:
    """Return the cluster, and the rules: those in the file, then the named ones, then single settings.

    Args:
        file: Cluster file, instead of a model and pools.
        model: Model by name or path.
        pools: Each `ROLE:COUNT:MACHINE`.
        rules_name: default or published; None: what the file says.
        settings: Each `FIELD=VALUE`.
        profile: Measurements of one's own, as for `build_cluster`.
        reference: Machine that slowdowns compare with.
        times: Source of phase times, as for `build_cluster`.

    Raises:
        SpecError: Something is missing, contradictory, unknown or not allowed.
    """
    if rules_name is not None and rules_name not in _RULES:
        raise SpecError.unknown("--rules", rules_name, _RULES)
    if file is not None and (model or pools):
        raise SpecError("--cluster: names model and pools itself, leave out --model and --pool")
    if file is None and not (model and pools):
        missing = "--model" if pools else "--pool" if model else "--model and --pool"
        raise SpecError(f"{missing}: missing, say what is simulated (or give --cluster FILE.yaml)")
    from phasesplit.files.catalog import build_cluster
    from phasesplit.files.places import fields_of, inside
    from phasesplit.files.rules import rules_from, rules_setting
    from phasesplit.files.specs import load_machine, load_model, read_cluster

    name, rules = None, rules_from({})
    if file is None:
        assert model is not None  # noqa: S101 - checked above
        served = load_model(model, where="--model")
        parts = [_pool(text) for text in pools or []]
    else:
        spec, where = read_cluster(file)
        name, served = spec.name, load_model(spec.model, where=where("model"))
        rules = rules_from(spec.rules, inside(where, "rules"))
        parts = [
            (str(one.role), one.count, load_machine(one.machine, where=where(f"pools[{number}].machine")))
            for number, one in enumerate(spec.pools)
        ]
    if rules_name is not None:
        rules = rules_from({"published": rules_name == "published"}, fields_of("--rules"), rules)
    rules = rules_from(dict(rules_setting(text) for text in settings), fields_of("--set"), rules)
    built = build_cluster(
        served,
        parts,
        published=rules.published,
        profile=profile,
        source=times,
        name=name,
        reference=load_machine(reference, where="--reference"),
    )
    return built, rules


def _pool(text: str) -> "tuple[str, int, Machine]":
    """Return role, count and machine of `ROLE:COUNT:MACHINE`."""
    from phasesplit.domain.cluster import Role
    from phasesplit.files.schema import MOST_MACHINES
    from phasesplit.files.specs import load_machine

    parts = text.split(":", 2)
    if len(parts) != 3:
        raise SpecError.bad("--pool", text, "ROLE:COUNT:MACHINE, such as prefill:25:dgx-h100")
    role, count, machine = parts
    purpose = Role.parse(role, f"--pool {text}, role")
    if not (count.isascii() and count.isdigit() and 1 <= int(count[:12]) <= MOST_MACHINES):
        raise SpecError.bad(f"--pool {text}, count", count, f"a whole number from 1 to {MOST_MACHINES:,}")
    return str(purpose), int(count), load_machine(machine, where=f"--pool {text}, machine")
