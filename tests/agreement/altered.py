"""`phasesplit serve` whose workers are altered: `python altered.py shared-memory|tcp serve ...`.

Freed blocks are filled with a large number, so that whoever reads them late writes nonsense; and KV takes the way that
is asked for, though the workers share a host.
"""

import sys
from typing import Any

from phasesplit.cli import main


def alter_serve(way: str) -> None:
    """Let `serve` start workers through this file."""
    from phasesplit.launcher import local_cluster

    commands_of = local_cluster.worker_commands

    def commands(*arguments: Any) -> dict[str, Any]:
        return {
            name: lambda epoch, command=command: [sys.executable, __file__, way, *command(epoch)[3:]]
            for name, command in commands_of(*arguments).items()
        }

    local_cluster.worker_commands = commands


def alter_worker(way: str) -> None:
    """Let this worker poison what it frees, and listen in one way only."""
    from phasesplit.launcher import embedded

    endpoint_of, engine_of, calibrated_of = embedded.KvEndpoint, embedded.Engine, embedded.calibrated
    is_tcp = way == "tcp"

    def endpoint(*arguments: Any, **options: Any) -> Any:
        closed = {"directory": None} if is_tcp else {"tcp": None}
        return endpoint_of(*arguments, **options | closed, poison=True)

    embedded.KvEndpoint = endpoint
    embedded.Engine = lambda *arguments, **options: engine_of(*arguments, **options, poison=True)
    embedded.calibrated = lambda *arguments, **_: calibrated_of(*arguments, transport="tcp" if is_tcp else "unix")


if __name__ == "__main__":
    way = sys.argv.pop(1)
    (alter_serve if sys.argv[1] == "serve" else alter_worker)(way)
    main()
