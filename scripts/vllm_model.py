"""Write the default model as vLLM reads it: a directory with safetensors, made from the GGUF that phasesplit serves.

Run in an environment with vLLM: python scripts/vllm_model.py DIRECTORY
"""

import sys
from pathlib import Path

from phasesplit.engine.fetch import model_path


def main() -> None:
    """Write the directory that the first argument names, unless it is there."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    directory = Path(sys.argv[1])
    if (directory / "model.safetensors").exists():
        return
    gguf = model_path("default", lambda line: print(line, file=sys.stderr))
    place = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    whole = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(**place, dtype=torch.bfloat16, quantization_config=whole)
    AutoTokenizer.from_pretrained(**place).save_pretrained(directory)
    model.save_pretrained(directory)
    print(f"{directory}: the default model, bfloat16")


if __name__ == "__main__":
    main()
