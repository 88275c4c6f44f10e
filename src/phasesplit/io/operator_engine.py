"""The border to the optional package aiconfigurator-core: its operator tables as times of whole iterations."""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version as installed_version
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from phasesplit.domain.machine import Machine
from phasesplit.domain.model import Model
from phasesplit.errors import SpecError
from phasesplit.io.hf_config import model_from_config
from phasesplit.io.text import read_json

SYSTEMS = {
    "dgx-a100": "a100_sxm",
    "dgx-h100": "h100_sxm",
    "dgx-h200": "h200_sxm",
    "dgx-b200": "b200_sxm",
    "l40s": "l40s",
}
"""Machines of this catalog to what the package calls their accelerators."""

BACKENDS = ("sglang", "trtllm", "vllm")
"""Engines whose operators the package has tables for."""

SAME_PARAMETERS_SHARE = 0.03
"""How far the parameters of a packaged model may be from the model's, the sizes of its layers being the same.

Layers are what takes the time. Llama 2 70B and Llama 3.1 70B differ in their embeddings alone: 2.2 % of all parameters.
"""

SAME_PRECISION_SHARE = 0.1
"""The same for bytes per parameter: what tells BF16 from FP8, and not 135 GB from 138 GB for 69 billion."""

_PACKAGE = "aiconfigurator-core"
_SIZES = ("layers", "hidden", "query_heads", "kv_heads", "head_dim", "experts", "experts_per_token")
_KV_KINDS = {2.0: "bfloat16", 1.0: "fp8"}
_MEASURED_AT_TOKENS = 512


@dataclass(frozen=True, slots=True, eq=False)
class OperatorEngine:
    """The tables of one engine for one model on one machine, added up to iterations.

    Attributes:
        described: Model, system, engine, parallelism and package, as a report prints them.
        handle: The package's compiled engine.
    """

    described: str
    handle: Any

    def prefill_s(self, prompts: int, tokens: int) -> float:
        """Return the time of an iteration over so many prompts of so many tokens each."""
        with _one_line(self.described):
            return float(self.handle.predict_prefill_latency(prompts, tokens)) / 1e3

    def decode_s(self, requests: int, context_tokens: int) -> float:
        """Return the time of one decode iteration over so many requests, each with so many tokens of context."""
        # Of two output tokens the first ends prefill: what the package calls decoding is then one iteration.
        with _one_line(self.described):
            return float(self.handle.predict_decode_latency(requests, context_tokens, 2)) / 1e3

    def measured_share(self) -> float:
        """Return the share of the time that operators measured at or around their size make up, from 0 to 1.

        Of a prompt of 512 tokens and one decode iteration behind it; the rest is the package's formulae and mixtures.
        """
        with _one_line(self.described):
            phases = self.handle.run_static_per_op(batch_size=1, isl=_MEASURED_AT_TOKENS, osl=2)
        parts = [(float(ms), origin) for operators in phases for _, ms, _, origin in operators]
        return sum(ms for ms, origin in parts if origin == "silicon") / sum(ms for ms, _ in parts)


def engine_named(source: str) -> tuple[str, str | None]:
    """Return engine and version of `aiconfigurator[:engine[:version]]`, by default vllm and the newest complete one.

    Raises:
        SpecError: The text is not of that form.
    """
    name, *rest = source.split(":")
    if name != "aiconfigurator" or len(rest) > 2 or not all(rest):
        raise SpecError.bad("source of phase times", source, "aiconfigurator[:engine[:version]]")
    backend, version = (*rest, None, None)[:2]
    return backend or "vllm", version


def operator_engine(
    model: Model, machine: Machine, *, backend: str, version: str | None, config: Path | None
) -> OperatorEngine:
    """Return the tables for a model, tensor-parallel over a machine's accelerators; arguments as `operator_times`."""
    whole = machine.profile_name
    if whole not in SYSTEMS:
        raise SpecError.unknown("aiconfigurator, machine", whole, SYSTEMS)
    if backend not in BACKENDS:
        raise SpecError.unknown("aiconfigurator, engine", backend, BACKENDS)
    tables = _installed()
    system = SYSTEMS[whole]
    slots = dict(tables.get_version_slots(system, backend) or {})
    asked = version or "current"
    if asked not in slots and asked not in slots.values():
        raise SpecError.unknown(f"aiconfigurator, version of {backend} on {system}", asked, {*slots, *slots.values()})
    if model.value_bytes not in _KV_KINDS:
        raise SpecError.bad(f"aiconfigurator, model {model.name}, value_bytes", model.value_bytes, "2 or 1")
    name, described_by = _config_of(model, config)
    if backend == "vllm" and (described_by.get("quantization_config") or {}).get("weight_block_size"):
        # A decode iteration of Qwen3-32B-FP8 takes 80 ms on two B200 by these tables, 7 ms by those of SGLang: products
        # of any size take 60 us or more there, which is the time to launch them and not that of the product.
        raise SpecError.bad(f"aiconfigurator, engine for {name}, weights in FP8 blocks", backend, "sglang or trtllm")
    resolved = slots.get(asked, asked)
    described = (
        f"aiconfigurator: {name} on {system}, {backend} {resolved}, tensor parallelism over {machine.accelerators},"
        f" {_PACKAGE} {installed_version(_PACKAGE)}"
    )
    with _one_line(described):
        handle = _compiled(
            json.dumps(described_by),
            system,
            backend,
            resolved,
            machine.accelerators,
            machine.accelerators if model.experts > 1 else None,
            _KV_KINDS[model.value_bytes],
        )
    return OperatorEngine(described=described, handle=handle)


def _installed() -> Any:
    try:
        from aiconfigurator_core.sdk import perf_database
    except ImportError as problem:
        raise SpecError(
            f"phase times from aiconfigurator: {_PACKAGE} cannot be loaded ({problem});"
            " install it with: pip install 'phasesplit[aiconfigurator]'"
        ) from problem
    return perf_database


def _config_of(model: Model, config: Path | None) -> tuple[str, dict[str, Any]]:
    """Return name and content of the config.json that describes the model, its own or a packaged one."""
    if config is not None:
        path = config / "config.json" if config.is_dir() else config
        content = read_json(path)
        if not _is_same(model_from_config(path, content), model):
            raise SpecError(f"{path}: describes other layers or weights than model {model.name}")
        # The package does not know Mistral by name; its layers are those of Llama.
        is_mistral = content["model_type"] == "mistral"
        return model.name, content | {"architectures": ["LlamaForCausalLM"]} if is_mistral else content
    packaged = _packaged_models()
    same = [name for name, (candidate, _) in packaged.items() if _is_same(candidate, model)]
    if not same:
        raise SpecError(
            f"aiconfigurator: no packaged model has the layers and weights of {model.name}; packaged are"
            f" {', '.join(sorted(packaged))}; others need their config.json"
        )
    nearest = min(same, key=lambda name: abs(packaged[name][0].parameters - model.parameters))
    return nearest, packaged[nearest][1]


def _is_same(candidate: Model, model: Model) -> bool:
    parameters = candidate.parameters / model.parameters
    precision = candidate.weights_bytes / model.weights_bytes / parameters
    return (
        all(getattr(candidate, size) == getattr(model, size) for size in _SIZES)
        and abs(parameters - 1) <= SAME_PARAMETERS_SHARE
        and abs(precision - 1) <= SAME_PRECISION_SHARE
    )


@cache
def _packaged_models() -> dict[str, tuple[Model, dict[str, Any]]]:
    """Return name to sizes and config.json of the packaged models of architectures that this package knows.

    Those with a quantization file next to their config.json are left out: that file says what their weights take.
    """
    found: dict[str, tuple[Model, dict[str, Any]]] = {}
    folder = Path(str(files("aiconfigurator_core") / "model_configs"))
    for path in sorted(folder.glob("*_config.json")):
        name = path.name.removesuffix("_config.json")
        if path.name.endswith("_hf_quant_config.json") or (folder / f"{name}_hf_quant_config.json").exists():
            continue
        content = read_json(path)
        try:
            found[name.replace("--", "/")] = (model_from_config(path, content), content)
        except SpecError:
            continue
    return found


@cache
def _compiled(
    config: str, system: str, backend: str, version: str, tensor_parallel: int, experts_parallel: int | None, kv: str
) -> Any:
    """Return the package's engine; the model goes in as a folder, since a name may be looked up over the network."""
    from aiconfigurator_core.sdk import EngineHandle

    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(config, encoding="utf-8")
        return EngineHandle.compile(
            folder,
            system,
            backend,
            backend_version=version,
            tp_size=tensor_parallel,
            moe_tp_size=experts_parallel,
            kvcache_quant_mode=kv,
            fmha_quant_mode=kv if kv == "bfloat16" else None,
        )


@contextmanager
def _one_line(described: str) -> Iterator[None]:
    """Turn what the package raises into one line, and keep its notes on tables of other models off the screen."""
    log = logging.getLogger("aiconfigurator_core")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    except (ArithmeticError, LookupError, NotImplementedError, RuntimeError, TypeError, ValueError) as problem:
        raise SpecError(f"{described}: no times ({' '.join(str(problem).split())})") from problem
    finally:
        log.setLevel(before)
