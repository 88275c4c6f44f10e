"""One vLLM machine in a process of its own, which a test tells what to do by lines of JSON. Run, not imported.

Its scheduler and its model share the process, so that the test sees every step: which request computes how many tokens.
"""

import json
import os
import select
import sys
import time
from typing import Any

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    OMP_NUM_THREADS="1",
    HF_HUB_OFFLINE="1",
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_NO_USAGE_STATS="1",
)

from vllm import LLM, SamplingParams


class Machine:
    """An engine, stepped by hand."""

    def __init__(self, settings: dict[str, Any], answers: Any) -> None:
        self._answers = answers
        self._llm = LLM(distributed_executor_backend="uni", enforce_eager=True, seed=0, **settings)
        self._engine = self._llm.llm_engine
        self._scheduler = self._engine.engine_core.engine_core.scheduler
        self._computed: dict[str, int] = {}
        self._schedule = self._scheduler.schedule
        self._scheduler.schedule = self._counted
        self._hear_transfers = self._scheduler._update_from_kv_xfer_finished
        self._scheduler._update_from_kv_xfer_finished = self._timed
        self.tell({"up": True, "free": self._free()})

    def tell(self, answer: dict[str, Any]) -> None:
        self._answers.write(json.dumps(answer) + "\n")
        self._answers.flush()

    def turn(self) -> bool:
        """Compute a step if there is anything to do; return whether there was."""
        if not self._scheduler.has_requests():
            return False
        for output in self._engine.step():
            if output.finished:
                (text,) = output.outputs
                name = output.request_id
                self.tell(
                    {
                        "id": name,
                        "tokens": list(text.token_ids),
                        "why": text.finish_reason,
                        "computed": self._computed.pop(name, 0),
                        "at_s": time.monotonic(),
                        "handover": output.kv_transfer_params,
                    }
                )
        return True

    def obey(self, order: dict[str, Any]) -> None:
        """Carry out an order."""
        what = order["do"]
        if what == "add":
            params = SamplingParams(
                max_tokens=order["most"],
                temperature=0,
                ignore_eos=True,
                extra_args={"kv_transfer_params": order["kv"]} if order.get("kv") else None,
            )
            self._engine.add_request(order["id"], {"prompt_token_ids": order["prompt"]}, params)
        elif what == "abort":
            self._engine.abort_request([order["id"]])
        elif what in ("threshold", "disconnect"):
            from vllm.distributed.kv_transfer import get_kv_transfer_group

            half = get_kv_transfer_group()._worker
            if what == "threshold":
                half._transfers.threshold_tokens = order["tokens"]
            else:
                outgoing = half._transfers._endpoint.outgoing
                half._transfers.do(lambda: outgoing.disconnect(order["peer"]))
        elif what == "forget":
            self.tell({"forgot": self._llm.reset_prefix_cache()})
        elif what == "state":
            waiting = len(self._scheduler.waiting) + len(self._scheduler.kv_holding_waiting)
            self.tell(
                {
                    "free": self._free(),
                    "requests": len(self._scheduler.requests),
                    "waiting": waiting,
                    "running": len(self._scheduler.running),
                }
            )

    def _timed(self, output: Any) -> None:
        for name in output.finished_recving or ():
            self.tell({"kv": name.rsplit("-", 1)[0], "at_s": time.monotonic()})
        self._hear_transfers(output)

    def _free(self) -> int:
        return int(self._scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def _counted(self, *given: Any) -> Any:
        output = self._schedule(*given)
        for name, tokens in output.num_scheduled_tokens.items():
            name = name.rsplit("-", 1)[0] if name not in self._computed and "-" in name else name
            self._computed[name] = self._computed.get(name, 0) + tokens
        return output


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM prints
    machine = Machine(json.loads(sys.argv[1]), answers)
    for line in _lines(machine):
        machine.obey(json.loads(line))


def _lines(machine: Machine) -> Any:
    buffer = b""
    while True:
        is_busy = machine.turn()
        if select.select([0], [], [], 0 if is_busy else 0.01)[0]:
            read = os.read(0, 1 << 20)
            if not read:
                os._exit(0)
            buffer += read
        while b"\n" in buffer:
            line, buffer = buffer.split(b"\n", 1)
            yield line


if __name__ == "__main__":
    main()
