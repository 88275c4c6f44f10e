"""What commands share: groups of options, outputs that are checked first, cluster and rules from options."""

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer

from phasesplit.console.options import (
    ClusterOptions,
    LoadOptions,
    ReplayOptions,
    RuleOptions,
    checked_outputs,
    cluster_and_rules,
    option,
    with_groups,
)
from phasesplit.domain.cluster import Role
from phasesplit.errors import SpecError

MACHINES = ClusterOptions(model="llama2-70b", pools=["prompt:2:dgx-h100", "decode:1:dgx-h100"])


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SizeOptions:
    width: Annotated[int, option("--width", text="How wide.")] = 1
    names: Annotated[list[str] | None, option("--named", text="What is in it.")] = None


def ran(command: Any, *arguments: str) -> Any:
    """Return what a command returns for arguments of the command line."""
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command()(with_groups(command))
    return app(list(arguments), standalone_mode=False)


def test_fields_of_a_group_are_options_of_the_command() -> None:
    """An option would be missing from the command line, or its value be lost."""

    def command(
        *, first: str, size: SizeOptions, last: Annotated[bool, option("--last", text="The last.")] = False
    ) -> Any:
        """Return what was given."""
        return first, size, last

    assert ran(command, "a") == ("a", SizeOptions(), False)
    given = ran(command, "a", "--width", "3", "--named", "x", "--named", "y", "--last")
    assert given == ("a", SizeOptions(width=3, names=["x", "y"]), True)


def test_options_stand_where_their_group_stands() -> None:
    """The help would list options in another order than the command has them."""

    def command(*, load: ReplayOptions, size: SizeOptions, last: str = "") -> None:
        """Do nothing."""

    app = typer.Typer(add_completion=False)
    app.command()(with_groups(command))
    names = [parameter.name for parameter in typer.main.get_command(app).params]
    assert names == ["rate", "duration", "count", "clip", "seed", "width", "names", "last"]


def test_an_option_that_is_there_twice_is_refused() -> None:
    """One of two groups would silently get the other one's value."""

    def command(*, load: LoadOptions, replayed: ReplayOptions) -> None:
        """Do nothing."""

    with pytest.raises(TypeError, match="an option is there twice"):
        with_groups(command)


def test_pools_and_settings_become_cluster_and_rules() -> None:
    """A simulation would be of another cluster, or by other rules, than the command says."""
    cluster, rules = cluster_and_rules(MACHINES, RuleOptions(settings=["transfer=serialized"]), seed=7)
    assert [(pool.role, pool.count, pool.machine.name) for pool in cluster.pools] == [
        (Role.PREFILL, 2, "dgx-h100"),
        (Role.DECODE, 1, "dgx-h100"),
    ]
    assert (rules.transfer.name, rules.seed, rules.published) == ("SERIALIZED", 7, False)
    assert cluster_and_rules(MACHINES, RuleOptions(rules="published"))[1].published


def test_a_setting_goes_before_the_seed_of_the_command() -> None:
    """`--set seed=1` would be overruled."""
    assert cluster_and_rules(MACHINES, RuleOptions(settings=["seed=1"]), seed=7)[1].seed == 1


@pytest.mark.parametrize(
    ("machines", "by", "start"),
    [
        (ClusterOptions(), RuleOptions(), "--model and --pool: missing"),
        (ClusterOptions(model="llama2-70b"), RuleOptions(), "--pool: missing"),
        (ClusterOptions(cluster="c.yaml", model="m"), RuleOptions(), "--cluster: names model and pools itself"),
        (ClusterOptions(model="llama2-70b", pools=["prefill:2"]), RuleOptions(), "--pool: got 'prefill:2'"),
        (ClusterOptions(model="llama2-70b", pools=["prefill:0:a"]), RuleOptions(), "--pool prefill:0:a, count"),
        (MACHINES, RuleOptions(rules="paper"), "--rules"),
        (MACHINES, RuleOptions(settings=["transfer=never"]), "--set"),
        (MACHINES, RuleOptions(reference="none-such"), "--reference"),
    ],
)  # fmt: skip
def test_wrong_options_name_their_option(machines: ClusterOptions, by: RuleOptions, start: str) -> None:
    """A person would look for the mistake in another option."""
    with pytest.raises(SpecError) as caught:
        cluster_and_rules(machines, by)
    assert str(caught.value).startswith(start)


def test_outputs_are_checked_before_the_work(tmp_path: Path) -> None:
    """A simulation of an hour would end with a file that cannot be written, or replace its own input."""
    page, rows = tmp_path / "page.html", tmp_path / "rows.csv"
    assert list(checked_outputs([None], requests=rows, parquet=None, figure=None, html=page)) == [rows, page]
    for wrong in ({"html": rows}, {"requests": tmp_path / "none" / "rows.csv"}):
        with pytest.raises(SpecError):
            checked_outputs([], **wrong)
    with pytest.raises(SpecError, match="no other option names"):
        checked_outputs([str(rows)], requests=rows)
