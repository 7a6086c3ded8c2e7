"""Models by name: the files in `models/`, and any Hugging Face `config.json`.

The files are excerpts of the `config.json` published with each model (for Qwen, the base model's; for Seed-OSS, without
its dropouts, which nothing here does; for Gemma 3 that sees images, of its language model, with what its class
assumes), named as people write the model's name. Those of Llama 4, Ministral 3, EXAONE 4, CWM, dots.llm1, ERNIE 4.5,
Trinity, Qwen3.5, Kimi Linear and Granite 4.0 are not: they were put together from transformers' classes and what is
said of the models, and are checked only against rounded sizes. `tiny`, `demo` and `demo-tied` are our own, with bytes
for a vocabulary.
"""

from __future__ import annotations

import json
from pathlib import Path

from schedules.file_kinds import ENCODING, MODEL, wrong_kind
from schedules.model import ModelError, ModelSpec
from schedules.words import nearest, plain

_FOLDER = Path(__file__).parent / "models"


def names() -> list[str]:
    """The presets, sorted."""
    return sorted(path.stem for path in _FOLDER.glob("*.json"))


def load(name_or_path: str | Path) -> ModelSpec:
    """The model of a preset's name, of a `config.json`, or of a folder that holds one.

    A preset's name wins over a path of the same spelling. Raises ModelError when there is neither, when the
    file is not JSON, or when it describes no model that MegaTrain can train.
    """
    wanted = str(name_or_path)
    if not wanted.strip():
        raise ModelError("no model is named: give a preset's name, or the path of a config.json")
    preset = wanted.lower()
    if preset in names():
        return _read(_FOLDER / f"{preset}.json", preset)
    path = Path(name_or_path)
    if path.is_dir():
        path = path / "config.json"
    if path.is_file():
        return _read(path, plain(path.resolve().parent.name if path.name == "config.json" else path.stem))
    if path.suffix == ".json" or len(path.parts) > 1:
        meant = f"; a preset is called {path.name.lower()}" if path.name.lower() in names() else ""  # as a hub has it
        raise ModelError(f"there is no file {path}{meant}")
    near = nearest(preset, names())
    hint = f"nearest are {', '.join(near)}" if near else f"there are {', '.join(names())}"
    raise ModelError(f"no model is called {wanted!r}; {hint}, or give the path of a config.json")


def _read(path: Path, name: str) -> ModelSpec:
    try:
        text = path.read_text(encoding=ENCODING)
        if wrong := wrong_kind(text, MODEL):
            raise ModelError(f"{path} {wrong}")
        config = json.loads(text)
    except ModelError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(config, dict):
        raise ModelError(f"{path} holds no JSON object")
    return ModelSpec.from_hf_config(config, name)
