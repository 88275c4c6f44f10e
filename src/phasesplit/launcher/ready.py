"""What a person reads once a cluster is ready: where it is, what it is made of, and two ways to talk to it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """A cluster that serves.

    Attributes:
        url: Where.
        model: Name that clients ask for.
        needs_key: Whether clients have to bring a key.
        took_s: Seconds from start to here.
        workers: As the supervisor lists them.
        degraded: What keeps the cluster from being split as it should be, in words.
    """

    url: str
    model: str
    needs_key: bool
    took_s: float
    workers: Sequence[Mapping[str, Any]]
    degraded: Sequence[str] = ()

    def text(self) -> str:
        """Return what is printed."""
        return "\n".join([
            f"phasesplit serves {self.model} on {self.url} (ready in {self.took_s:.1f} s)",
            "",
            *self._machines(),
            *(f"! {why}" for why in self.degraded),
            "",
            "Talk to it:",
            "",
            *self._curl(),
            "",
            *self._python(),
            "",
            f"Watch it: phasesplit top {self.url}        Stop it: Ctrl-C",
        ])  # fmt: skip

    def _machines(self) -> list[str]:
        lines = ["  worker       pool     pid      memory   KV memory         its KV leaves through"]
        splits = len({worker["announcement"]["home"] for worker in self.workers if worker["announcement"]}) > 1
        for worker in self.workers:
            facts = worker["announcement"] or {}
            layout = facts.get("layout", {})
            blocks, tokens = facts.get("capacity_blocks", 0), layout.get("block_tokens", 0)
            link = _link(facts) if splits else "-"
            lines.append(
                f"  {worker['name']:<12} {facts.get('home', '?'):<8} {worker['pid'] or '-':<8} "
                f"{facts.get('memory_bytes', 0) / 1e6:4.0f} MB  {blocks * tokens:7,} tokens    {link}"
            )
        return lines

    def _curl(self) -> list[str]:
        key = ['    -H "Authorization: Bearer $KEY" \\'] if self.needs_key else []
        body = f'{{"model": "{self.model}", "stream": true, "messages": [{{"role": "user", "content": "Hello!"}}]}}'
        return [
            f"  curl -N {self.url}/v1/chat/completions \\",
            *key,
            "    -H 'Content-Type: application/json' \\",
            f"    -d '{body}'",
        ]

    def _python(self) -> list[str]:
        key = 'os.environ["KEY"]' if self.needs_key else '"none"'
        return [
            *(["  import os"] if self.needs_key else []),
            "  from openai import OpenAI",
            f'  client = OpenAI(base_url="{self.url}/v1", api_key={key})',
            '  chat = [{"role": "user", "content": "Hello!"}]',
            f'  for chunk in client.chat.completions.create(model="{self.model}", messages=chat, stream=True):',
            '      print(chunk.choices[0].delta.content or "", end="", flush=True)',
        ]


def _link(facts: Mapping[str, Any]) -> str:
    kind = "shared memory" if facts.get("address", {}).get("unix") else "TCP"
    measured = str(facts.get("link", ""))
    return f"{kind}: {measured}" if facts.get("home") != "decode" else "(takes KV)"
